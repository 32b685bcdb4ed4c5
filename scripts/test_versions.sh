#!/bin/sh
# The tests of what touches torch and transformers, and both launchers on two nodes, with other
# versions than those of constraints.txt: test_versions.sh PYTHON oldest|newest|TORCH [PYTEST OPTIONS]
#
# oldest: first the lower bounds of pyproject.toml, for the loader; then those of
# orchmllm/loader/versions.py, for transformers' Trainer and its models' encoders; then the first
# transformers of orchmllm/models/families.py, for the trainer. newest: what pip finds. TORCH: this
# version of torch, such as 2.11, with the newest of the others. Each has an environment of its own in
# build/versions. PIP_EXTRA_INDEX_URL may name PyTorch's CPU index, whose
# torch is 5 GB smaller. The nodes are network namespaces, which need root.
set -eu
python=$1
end=${2:?"name an end: make test-versions END=oldest, END=newest or END=2.11, a version of torch"}
shift 2
venv=build/versions/$end
tools="setuptools>=77 pybind11>=2.12 pytest>=8 pytest-timeout hypothesis jsonschema psutil av>=16.1"

bounds() {  # NAME>=VERSION of the dependencies in pyproject.toml, with OPERATOR instead of >=
    sed -n '/^dependencies = \[/,/^\]/s/^ *"\(.*\)>=\(.*\)",$/\1'"$1"'\2/p' pyproject.toml
}
floor() {  # of a package of versions.py
    sed -n 's/.*"'"$1"'": "\([0-9.]*\)".*/\1/p' orchmllm/loader/versions.py
}
first() {  # transformers that the trainer takes
    sed -n 's/^FIRST, BEFORE = (\([0-9]*\), \([0-9]*\)).*/\1.\2/p' orchmllm/models/families.py
}
extras() {  # NAME>=VERSION of what some models need, likewise
    sed -n 's/^\(lora\|generator\) = \["\(.*\)>=\(.*\)"\]/\2'"$1"'\3/p' pyproject.toml
}
pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check install -q "$@"
}
run() {  # -rs: says why tests are left out
    PYTHONPATH=$PWD "$venv/bin/python" -m pytest -q -rs -p no:cacheprovider "$@"
}
said() {
    "$venv/bin/python" -c 'import torch, transformers
print("== torch", torch.__version__, "transformers", transformers.__version__, flush=True)'
}
loader() {
    run tests/loader/test_dropin.py tests/loader/test_loss.py "$@"
}
trainer() {
    run tests/models tests/sharding tests/comm --ignore tests/comm/test_programs.py \
        tests/e2e/test_trainer.py tests/e2e/test_missing_modality.py tests/e2e/test_whole_model.py \
        tests/runtime/test_resume.py tests/tools/export tests/tools/generate "$@"
    run -m slow tests/e2e/test_two_nodes.py
}
clients() {  # without what needs TRL or torchvision, or reads a class that is newer than 5.17
    run tests/encoders tests/loader/test_trainer_losses.py "$@" \
        --deselect tests/encoders/test_encoder_families.py::test_a_field_left_out_fails_loudly \
        --deselect tests/encoders/test_image_bytes.py::test_an_image_that_the_encoder_would_not_see_travels_as_float32 \
        --deselect tests/loader/test_trainer_losses.py::test_losses_that_balancing_changes_are_refused_with_the_cure \
        --deselect tests/loader/test_trainer_losses.py::test_models_with_encoders_are_trained_as_in_one_process
}

# a block runs 82 kernels with an older torch, and 80 with the one that is pinned
other_kernels="--deselect tests/models/test_fused.py::test_a_block_of_text_runs_few_kernels"

test -d "$venv" || "$python" -m venv "$venv"
case $end in
oldest)
    pip $tools $(bounds ==)
    pip --no-deps --no-build-isolation -e .
    said
    loader "$@"
    pip "transformers==$(floor transformers).*" "accelerate==$(floor accelerate).*"
    said
    clients "$@"
    pip "transformers==$(first).*" $(extras ==)
    said
    trainer "$@" $other_kernels
    ;;
newest | [0-9]*)
    torch=torch
    test "$end" = newest || { torch="torch==$end.*"; set -- "$@" $other_kernels; }
    pip --upgrade $tools $(bounds '>=') $(extras '>=') accelerate "$torch"
    pip --no-deps --no-build-isolation -e .
    said
    loader "$@"
    trainer "$@"
    clients "$@"
    ;;
*)
    echo "error: END=$end: must be oldest, newest or a version of torch, such as 2.11" >&2
    exit 2
    ;;
esac
