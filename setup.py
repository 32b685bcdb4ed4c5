"""Build of the native core `orchmllm._core`; everything else is in pyproject.toml."""

from glob import glob

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

setup(
    ext_modules=[
        # No -march=native: the same bits on every node of a cluster (plans are compared by digest).
        Pybind11Extension("orchmllm._core", sorted(glob("cpp/*.cpp")), cxx_std=17,
                          depends=sorted(glob("cpp/*.hpp")),
                          extra_compile_args=["-O3", "-ffp-contract=off"]),
    ],
    cmdclass={"build_ext": build_ext},
)
