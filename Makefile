# make demo: install, build, write the demo corpus, train with balancing off and on, compare.
# make test: the same set-up and the test tools, then the fast tests. Installs into .venv, only once.
# make test-slow: lists the groups of slow tests; make test-slow GROUP=data runs one.
# make gpu: on one GPU, what cannot be done without one, in parts; PARTS="tests bench" runs these.
# make gpu-carry: what a machine without a package registry needs for it, for FOR=3.12.
# make docs: the site of docs/, into site/; a warning is an error.
# make wheel: a wheel of this machine's Python and architecture for other machines, into dist/.
# make test-versions END=oldest: the tests of what touches torch and transformers, and a launch on two
# nodes, with the oldest versions that are supported; END=newest: with the newest there are;
# END=2.11: with torch 2.11, which the runs on GPUs had, and the newest of the others.
# PYTHON=python3.12 picks the interpreter; ARGS=... is passed on, e.g. ARGS=train.num_steps=40 to the
# demo and ARGS=--durations=20 to the tests.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/ready
ARGS ?=
# Where this is set, each of the hundreds of processes that the tests start compiles what it imports.
export PYTHONDONTWRITEBYTECODE :=
# Processes of make test: ranks wait for each other and for the disk, so 2 cores keep 3
# busy; 4 are no faster.
WORKERS ?= 3

.NOTPARALLEL:
.PHONY: demo test test-slow test-versions bench gpu gpu-carry docs wheel lint sanitize clean setup setup-test

demo: setup demo_data/data.jsonl
	$(RUN) -m orchmllm compare recipes/demo.yaml $(ARGS)

test: setup-test
	$(RUN) -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder --session-timeout 3600 $(ARGS)

# Each takes a few minutes on 2 quiet cores.
SLOW_checkpoints := tests/runtime
SLOW_clients := tests/loader/test_clients.py
SLOW_trainers := tests/loader/test_trainer_clients.py tests/loader/test_trainer_meshes.py
SLOW_encoders := tests/encoders/test_encoder_families.py
SLOW_dropin := $(filter-out $(SLOW_clients) $(SLOW_trainers) $(SLOW_encoders), \
    $(wildcard tests/loader/test_*.py tests/encoders/test_*.py))
SLOW_data := tests/data tests/e2e/test_paper_mix.py tests/e2e/test_nothing_read.py
SLOW_plan := tests/plan tests/comm tests/tools/doctor
# The whole kit of `make gpu` at tiny sizes, in a Python without pip and network.
SLOW_kit := tests/gpu_kit
SLOW_planned := tests/sharding/test_planned_phases.py
SLOW_keys := tests/sharding/test_keys_of_models.py
SLOW_models := tests/models tests/proof $(filter-out $(SLOW_planned) $(SLOW_keys), $(wildcard tests/sharding/test_*.py)) \
    tests/tools/export tests/tools/generate
SLOW_memory := tests/tools/predict/test_scale_memory.py tests/tools/predict/test_tracked_memory.py \
    tests/tools/predict/test_longest.py
SLOW_estimate := tests/papers tests/tools/data tests/docs \
    $(filter-out $(SLOW_memory), $(wildcard tests/tools/predict/test_*.py))
SLOW_mutations := tests/test_mutations.py
SLOW_recipes := tests/e2e/test_any_recipe.py
SLOW_soak := tests/e2e/test_soak.py
SLOW_learning := tests/e2e/test_demo.py tests/e2e/test_media_swap.py
SLOW_GROUPS := checkpoints dropin encoders clients trainers data plan models planned keys memory estimate e2e \
    kit soak learning recipes mutations
SLOW_e2e := tests/cli tests/config tests/tools/report tests/tools/init $(filter-out $(SLOW_data) $(SLOW_soak) $(SLOW_learning) \
    $(SLOW_recipes), $(wildcard tests/e2e/test_*.py))

ifeq ($(GROUP),)
test-slow:
	@echo "make test-slow GROUP=... runs the slow tests of a group:"
	@$(foreach g,$(SLOW_GROUPS),echo "$(g): $(SLOW_$(g))";)
else ifeq ($(filter $(GROUP),$(SLOW_GROUPS)),)
$(error GROUP=$(GROUP) is no group of slow tests; there are $(SLOW_GROUPS))
else
test-slow: setup-test
	$(RUN) -m pytest -q -m slow --session-timeout 3600 $(SLOW_$(GROUP)) $(ARGS)
endif

bench: setup
	@for script in scripts/bench_*.py; do \
	    test -e "$$script" || { echo "no scripts/bench_*.py here"; exit 1; }; \
	    echo "== $$script"; $(RUN) "$$script" $(ARGS) || exit 1; done

# With the environment of the other targets if there is one, else with the Python that is there:
# it installs nothing. TINY=1 runs all of it on a CPU.
gpu:
	@$(if $(wildcard $(READY)),$(RUN),$(PYTHON)) -m scripts.gpu $(PARTS) $(if $(TINY),--tiny) $(ARGS)

FOR ?= 3.12
gpu-carry: setup
	$(RUN) scripts/gpu/carry.py --python $(FOR) $(ARGS)

docs: $(READY)-docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build  # --quiet would hide warnings
	@echo "open site/index.html, or: $(RUN) -m http.server -d site"

# auditwheel says which systems the wheel works on: those with this machine's glibc and newer ones.
wheel: $(READY)-release
	rm -rf build/wheel
	$(RUN) -m pip wheel -q --no-deps --no-build-isolation -w build/wheel .
	PATH="$(abspath $(VENV))/bin:$$PATH" $(RUN) -m auditwheel repair -w dist build/wheel/*.whl

test-versions:
	@sh scripts/test_versions.sh "$(PYTHON)" "$(END)" $(ARGS)

lint: setup-test
	$(RUN) -m ruff check .

# The native core under AddressSanitizer and UndefinedBehaviorSanitizer, in a copy of the package.
# Python's own flags have -fwrapv, with which no overflow would be found.
# libstdc++ is loaded first too: Python does not link it, and the sanitizer has to find its throw.
SANITIZE := -fno-wrapv -fsanitize=address,undefined -fno-sanitize-recover=all -O1 -g
sanitize: setup-test
	rm -rf build/sanitize
	CFLAGS="$(SANITIZE)" CXXFLAGS="$(SANITIZE)" LDFLAGS="$(SANITIZE)" $(RUN) setup.py -q build \
	    --build-base build/sanitize --build-lib build/sanitize/lib
	@nm -D build/sanitize/lib/orchmllm/_core*.so | grep -q __asan_report || \
	    { echo "the core was built without the sanitizers"; exit 1; }
	cp -r tests scripts recipes pyproject.toml build/sanitize/lib
	cd build/sanitize/lib && ASAN_OPTIONS=detect_leaks=0 \
	    LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) \
	    $$($${CXX:-c++} -print-file-name=libstdc++.so)" \
	    $(CURDIR)/$(RUN) -m pytest -q -p no:cacheprovider --timeout 900 \
	    tests/plan/test_balance*.py tests/plan/test_nodewise.py tests/plan/test_plan_schemes.py

setup: $(READY)
	@$(RUN) setup.py -q build_ext --inplace

setup-test: setup $(READY)-test

SETUP_FILES := pyproject.toml constraints.txt scripts/setup_venv.sh
$(READY): $(SETUP_FILES)
	@sh scripts/setup_venv.sh "$(PYTHON)" $(VENV) '.[tools]'
	@touch $@

$(READY)-test $(READY)-docs $(READY)-release: $(READY)-%: $(READY)
	@sh scripts/setup_venv.sh "$(PYTHON)" $(VENV) '.[$*]'
	@touch $@

# The corpus is a function of this file alone; data.jsonl is the last file that it writes.
demo_data/data.jsonl: orchmllm/tools/init/demo.py | setup
	$(RUN) scripts/make_demo_data.py --out demo_data --num-examples 400 --seed 0

clean:  # leaves runs/, which may hold checkpoints
	rm -rf $(VENV) build dist site demo_data gpu_carried *.egg-info orchmllm/*.so .pytest_cache .ruff_cache .hypothesis
