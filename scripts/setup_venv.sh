#!/bin/sh
# Installs orchmllm and what it needs into a virtual environment: setup_venv.sh PYTHON VENV PACKAGE
# PACKAGE: `.`, or with extras, `.[test]`
#
# Versions come from constraints.txt. Where PYTHON can already import a torch that is new enough, the
# environment uses that one (system site packages) instead of installing another.
set -eu
python=$1
venv=$2
package=$3

fail() {
    echo "error: $*" >&2
    exit 1
}

command -v "$python" >/dev/null ||
    fail "$python not found. Install Python 3.11 or newer (Debian, Ubuntu: apt install python3)," \
         "or name one: make PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" -V 2>&1) is too old: Python 3.11 or newer is needed. Name one:" \
         "make PYTHON=python3.11"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python has no venv module. Debian, Ubuntu: apt install python3-venv"
compiler=${CXX:-$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("CXX") or "c++")')}
command -v "${compiler%% *}" >/dev/null ||
    fail "no C++ compiler (${compiler%% *}). Debian, Ubuntu: apt install g++"
"$python" -c 'import os, sysconfig, sys
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
    fail "Python.h is missing for $python. Debian, Ubuntu: apt install python3-dev"

has_torch='import sys, torch
if tuple(int(x) for x in torch.__version__.split(".")[:2]) < (2, 10): sys.exit(1)'
echo "Installing $package into $venv (a minute or two; longer if torch has to be downloaded)"
"$venv/bin/python" -c '' 2>/dev/null || rm -rf "$venv"  # a moved or half-made environment
if test ! -d "$venv" && "$python" -c "$has_torch" 2>/dev/null; then
    "$python" -m venv --system-site-packages "$venv"
    # A torch of another virtual environment is not among them.
    "$venv/bin/python" -c "$has_torch" 2>/dev/null || rm -rf "$venv"
fi
test -d "$venv" || "$python" -m venv "$venv"

constraints=constraints.txt
if "$venv/bin/python" -c "$has_torch"'
sys.exit(torch.__file__.startswith(sys.prefix))' 2>/dev/null; then
    echo "Using the torch that $python already has"
    constraints=$venv/constraints.txt
    grep -v '^torch==' constraints.txt >"$constraints"
fi
pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check "$@"
}
pip install -q -c "$constraints" setuptools pybind11
# No build isolation: that would install the build's own copies, unpinned.
pip install -q -c "$constraints" --no-build-isolation -e "$package"
