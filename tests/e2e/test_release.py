"""What is released: a wheel and a source archive, installed into an environment that has nothing of
this checkout. The packages that orchmllm needs are those of the environment of the tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.lib.commands import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a release is made from a clone")]
ENV = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PIP_CONFIG_FILE")} | {
    "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def run(*command, cwd: Path) -> str:
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=ENV, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> dict[str, Path]:
    """The source archive of what git has, and wheels of both."""
    folder = tmp_path_factory.mktemp("release")
    clone = folder / "clone"
    for name in run("git", "ls-files", "-z", cwd=ROOT).split("\0")[:-1]:
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    run(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", folder, cwd=clone)
    [source] = folder.glob("*.tar.gz")
    wheels = {"source": source}
    for kind, what in (("wheel", clone), ("wheel of the source archive", source)):
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
            "-w", folder / kind, what, cwd=folder)
        [wheels[kind]] = (folder / kind).glob("*.whl")
    return wheels


def installed(archive: Path, folder: Path) -> Path:
    """The bin folder of a new environment with the archive."""
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    (Path(site.strip()) / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--ignore-installed", archive,
        cwd=folder)
    return python.parent


@pytest.mark.parametrize("kind", ["wheel", "wheel of the source archive"])
def test_what_is_released_works_elsewhere(kind, archives, tmp_path):
    bin_dir = installed(archives[kind], tmp_path)
    where = run(bin_dir / "python", "-c", "import orchmllm._core as c; print(c.__file__)",
                cwd=tmp_path)
    assert where.startswith(str(tmp_path))
    assert "commands:" in run(bin_dir / "orchmllm", "--help", cwd=tmp_path)
    wrong = [line for line in subprocess.run(
        [bin_dir / "python", "-m", "pip", "check"], cwd=tmp_path, env=ENV, capture_output=True,
        text=True).stdout.splitlines() if line.startswith("orchmllm")]
    assert not wrong, wrong
    rows = run(bin_dir / "orchmllm", "papers", "reproduce", "omnibal", "--samples",
               "1000", "--table", "7",
               cwd=tmp_path)
    assert "3 not modelled" in rows  # from a table beside the code
    run(bin_dir / "orchmllm", "init", "--demo", "demo", cwd=tmp_path)  # recipes are in it, too
    assert "sampled  balanced" in run(bin_dir / "orchmllm", "data", "stats", "--ranks", "4",
                                      "--model", "demo/model", cwd=tmp_path)
    assert "no problems" in run(bin_dir / "orchmllm", "train", "demo/recipe.yaml", "--validate",
                                cwd=tmp_path)
    seconds, loaded = run(
        bin_dir / "python", "-c", "import sys, time; t = time.perf_counter(); import orchmllm; "
        "print(time.perf_counter() - t, {'torch', 'numpy', 'transformers'} & set(sys.modules))",
        cwd=tmp_path).split(maxsplit=1)
    assert loaded.strip() == "set()"
    print(f"import orchmllm: {float(seconds):.3f} s")


LOADER = """
import sys
for extra in {extras}:
    sys.modules[extra] = None  # as if it were not installed
import torch.distributed as dist
from orchmllm import BalancedDataLoader
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
loader = BalancedDataLoader(["a", "bb", "ccc"], batch_size=2, lengths=[1, 2, 3])
print(sorted(sum((list(batch) for batch in loader), [])))
dist.destroy_process_group()
"""


def test_the_loader_needs_no_extra(archives, tmp_path):
    with zipfile.ZipFile(archives["wheel"]) as wheel:
        names = wheel.namelist()
        [metadata] = [name for name in names if name.endswith("METADATA")]
        needs = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*(;.*)?$", wheel.read(metadata).decode(),
                           re.M)
    assert "orchmllm/py.typed" in names
    always = {name for name, extra in needs if "extra" not in extra}
    extras = sorted({name for name, extra in needs if "extra" in extra} - always - {"orchmllm"})
    assert {"matplotlib", "datasets", "pyarrow", "av"} <= set(extras)
    bin_dir = installed(archives["wheel"], tmp_path)
    assert run(bin_dir / "python", "-c", LOADER.format(extras=extras),
               cwd=tmp_path) == "['a', 'bb', 'ccc']\n"


def test_a_build_without_a_compiler_says_so_in_one_line(archives, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w",
         tmp_path, archives["source"]], cwd=tmp_path, env=ENV | {"CXX": "/nowhere/g++"},
        capture_output=True, text=True)
    said = [line.strip() for line in (done.stdout + done.stderr).splitlines()
            if line.strip().startswith("error:") and "subprocess" not in line]
    assert done.returncode and said == [
        "error: the C++ compiler /nowhere/g++ is missing: apt install g++, dnf install gcc-c++, or "
        "name one by CXX; a wheel of orchmllm needs none"]


def test_the_source_archive_has_what_a_build_needs(archives):
    with tarfile.open(archives["source"]) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    tracked = run("git", "ls-files", "cpp", "orchmllm", "README.md", "LICENSE", cwd=ROOT).split()
    assert set(tracked) <= names, set(tracked) - names
