# make demo: install, build, write the demo corpus, train with balancing off and on, compare.
# make test: the same set-up and the test tools, then the suite. Installs into .venv, only once.
# PYTHON=python3.12 picks the interpreter; ARGS=... is passed on, e.g. ARGS=train.num_steps=40

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/ready
ARGS ?=

.NOTPARALLEL:
.PHONY: demo test bench lint sanitize clean setup setup-test

demo: setup demo_data/data.jsonl
	$(RUN) -m orchmllm.cli.compare --recipe recipes/demo.yaml $(ARGS)

test: setup-test
	$(RUN) -m pytest -q --session-timeout 3600 $(ARGS)

bench: setup
	@for script in scripts/bench_*.py; do \
	    test -e "$$script" || { echo "no scripts/bench_*.py here"; exit 1; }; \
	    echo "== $$script"; $(RUN) "$$script" $(ARGS) || exit 1; done

lint: setup-test
	$(RUN) -m ruff check .

# The native core under AddressSanitizer and UndefinedBehaviorSanitizer, in a copy of the package.
# libstdc++ is loaded first too: Python does not link it, and the sanitizer has to find its throw.
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=all -O1 -g
sanitize: setup-test
	rm -rf build/sanitize
	CFLAGS="$(SANITIZE)" CXXFLAGS="$(SANITIZE)" LDFLAGS="$(SANITIZE)" $(RUN) setup.py -q build \
	    --build-base build/sanitize --build-lib build/sanitize/lib
	@nm -D build/sanitize/lib/orchmllm/_core*.so | grep -q __asan_report || \
	    { echo "the core was built without the sanitizers"; exit 1; }
	cp -r tests pyproject.toml build/sanitize/lib
	cd build/sanitize/lib && ASAN_OPTIONS=detect_leaks=0 \
	    LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) \
	    $$($${CXX:-c++} -print-file-name=libstdc++.so)" \
	    $(CURDIR)/$(RUN) -m pytest -q -p no:cacheprovider --timeout 900 \
	    tests/test_balance*.py tests/plan/test_nodewise.py tests/plan/test_plan_schemes.py \
	    tests/simulate/test_pipeline.py

setup: $(READY)
	@$(RUN) setup.py -q build_ext --inplace

setup-test: setup $(READY)-test

SETUP_FILES := pyproject.toml constraints.txt scripts/setup_venv.sh
$(READY): $(SETUP_FILES)
	@sh scripts/setup_venv.sh "$(PYTHON)" $(VENV) .
	@touch $@

$(READY)-test: $(READY)
	@sh scripts/setup_venv.sh "$(PYTHON)" $(VENV) '.[test]'
	@touch $@

# The corpus is a function of the script alone; data.jsonl is the last file that it writes.
demo_data/data.jsonl: scripts/make_demo_data.py | setup
	$(RUN) scripts/make_demo_data.py --out demo_data --num-examples 400 --seed 0

clean:  # leaves runs/, which may hold checkpoints
	rm -rf $(VENV) build demo_data *.egg-info orchmllm/*.so .pytest_cache .ruff_cache .hypothesis
