"""The whole kit at tiny sizes where there is no package manager and no network: a copy of the
working tree, a Python that can import little more than torch and transformers, and carried wheels.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts.gpu import lines
from scripts.gpu.parts import PARTS
from tests.lib.commands import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
THERE = ("torch", "transformers")  # and what they need, without some that older versions do not
LEFT_OUT = {"pydantic", "pydantic-core", "annotated-types", "typing-inspection", "setuptools"}
CARRIED = ("pydantic", "soundfile", "soxr", "pillow", "pybind11", "pytest", "pytest-timeout",
           "hypothesis", "jsonschema", "psutil", "transformers",
           "accelerate")


def closure(*names: str) -> set[str]:
    """The packages and all that they need, by canonical name."""
    found, queue = set(), list(names)
    while queue:
        name = queue.pop().lower().replace("_", "-")
        if name in found:
            continue
        found.add(name)
        for text in metadata.requires(name) or ():
            one = Requirement(text)
            if one.marker is None or one.marker.evaluate({"extra": ""}):
                queue.append(one.name)
    return found


def files_of(name: str) -> Iterator[tuple[str, Path]]:
    """(path in site-packages, file) of an installed package."""
    for path in metadata.distribution(name).files or ():
        if ".." not in path.parts and "__pycache__" not in path.parts:
            yield path.as_posix(), Path(path.locate())


def repack(name: str, folder: Path) -> None:
    """The installed package as a wheel, which pip could have downloaded."""
    found = metadata.distribution(name)
    tags = [line.split(": ")[1].split("-") for line in found.read_text("WHEEL").splitlines()
            if line.startswith("Tag: ")]
    tag = "-".join(".".join(dict.fromkeys(part)) for part in zip(*tags, strict=True))
    stem = found.metadata["Name"].replace("-", "_").replace(".", "_")
    with zipfile.ZipFile(folder / f"{stem}-{found.version}-{tag}.whl", "w",
                         zipfile.ZIP_DEFLATED) as file:
        for path, source in files_of(name):
            if source.exists():
                file.write(source, path)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """The working tree with what carry.py collects, from wheels that lie in a folder."""
    folder = tmp_path_factory.mktemp("kit")
    copy, wheels = folder / "tree", folder / "wheels"
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True,
                           capture_output=True, text=True).stdout.splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    wheels.mkdir()
    for name in closure(*CARRIED, "packaging", "setuptools") - {"torch"}:
        repack(name, wheels)
    done = subprocess.run(
        [sys.executable, "scripts/gpu/carry.py", "--out", str(copy / "gpu_carried"), "--python",
         f"{sys.version_info.major}.{sys.version_info.minor}", "--machine", platform.machine()],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {
            "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull})
    assert done.returncode == 0, done.stderr
    return copy


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """A Python without pip, whose packages are torch, transformers and what they need."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    for name in closure(*THERE) - LEFT_OUT:
        for top in {path.split("/")[0] for path, _ in files_of(name)}:
            link = site / top
            if not link.exists():
                link.symlink_to(Path(metadata.distribution(name).locate_file(top)))
    return folder / "bin" / "python"


def offline() -> list[str]:
    """Before a command: a namespace with a loopback device alone, where that is allowed."""
    up = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    works = shutil.which("unshare") and shutil.which("ip") and subprocess.run(
        [*up, "true"], capture_output=True).returncode == 0
    return up if works else []


def test_every_part_runs_with_what_is_carried(tree, bare, tmp_path):
    out = tmp_path / "out"
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PIP_NO_INDEX": "1",
                   "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9",
                   "no_proxy": "localhost,127.0.0.1", "CUDA_VISIBLE_DEVICES": ""}
    for name in ("pip", "pydantic", "soundfile"):
        there = subprocess.run([bare, "-c", f"import {name}"], capture_output=True,
                               env=environment)
        assert there.returncode, name
    done = subprocess.run(
        [*offline(), str(bare), "-m", "scripts.gpu", "--tiny", "--minutes", "55", "--out",
         str(out)], cwd=tree, env=environment, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, (done.stdout, done.stderr)
    found = {line["part"]: line for line in lines.read(out / "results.jsonl")}
    assert found.keys() == PARTS.keys()
    assert {name for name, line in found.items() if line["status"] != "ok"} == {"tests"}
    assert found["tests"]["figures"]["skipped"] > 0
    assert not any(lines.problems_of(line) for line in found.values())
    setup, plain = found["setup"]["figures"], found["train-none"]["figures"]
    assert setup["built"] and not setup["missing"]
    names = {name.split("-")[0] for name in setup["unpacked"]}
    assert {"pydantic", "soundfile", "pytest_timeout"} <= names
    assert plain["tokens_min"] >= 512 and (out / plain["trace"]).stat().st_size > 1000
    assert json.loads((out / "measured.json").read_text())["phases"]
    kept = [path for path in out.rglob("*") if path.is_file()]
    assert len(kept) <= 8 and all(path.parent == out for path in kept)
    said = (out / "summary.md").read_text() + (out / "results.jsonl").read_text()
    assert "h100-sxm" in said and str(tree) not in (out / "summary.md").read_text()
