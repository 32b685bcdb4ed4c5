"""Build of the native core `orchmllm._core`, and the packages: the recipes of the clone are one of
them, orchmllm/recipes. Everything else is in pyproject.toml."""

from glob import glob

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["orchmllm*"]), "orchmllm.recipes"],
    package_dir={"orchmllm.recipes": "recipes"},
    ext_modules=[
        # No -march=native: the same bits on every node of a cluster (plans are compared by digest).
        Pybind11Extension("orchmllm._core", sorted(glob("cpp/*.cpp")), cxx_std=17,
                          depends=sorted(glob("cpp/*.hpp")),
                          extra_compile_args=["-O3", "-ffp-contract=off"]),
    ],
    cmdclass={"build_ext": build_ext},
)
