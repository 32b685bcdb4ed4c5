"""Build of the native core `orchmllm._core`, and the packages: the recipes of the clone are one of
them, orchmllm/recipes. Everything else is in pyproject.toml."""

import os
import shutil
import sysconfig
from glob import glob

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import find_packages, setup
from setuptools.command.build import build


class CoreFirst(build):
    """Builds the core before all else: what it lacks is then not said after hundreds of lines."""

    sub_commands = sorted(build.sub_commands, key=lambda command: command[0] != "build_ext")


class BuildCore(build_ext):
    """Names what a build lacks in one line, instead of the output of a compiler."""

    def build_extensions(self) -> None:
        command = getattr(self.compiler, "compiler_so_cxx", self.compiler.compiler_so)[0]
        if not shutil.which(command):
            raise SystemExit(f"error: the C++ compiler {command} is missing: apt install g++, dnf "
                             "install gcc-c++, or name one by CXX; a wheel of orchmllm needs none")
        header = os.path.join(sysconfig.get_path("include"), "Python.h")
        if not os.path.exists(header):
            raise SystemExit(f"error: {header} is missing: apt install python3-dev or dnf install "
                             "python3-devel; a wheel of orchmllm needs none")
        super().build_extensions()


setup(
    packages=[*find_packages(include=["orchmllm*"]), "orchmllm.recipes"],
    package_dir={"orchmllm.recipes": "recipes"},
    ext_modules=[
        # No -march=native: the same bits on every node of a cluster (plans are compared by digest).
        Pybind11Extension("orchmllm._core", sorted(glob("cpp/*.cpp")), cxx_std=17,
                          depends=sorted(glob("cpp/*.hpp")),
                          extra_compile_args=["-O3", "-ffp-contract=off"]),
    ],
    cmdclass={"build": CoreFirst, "build_ext": BuildCore},
)
