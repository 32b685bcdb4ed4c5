"""Makes the working tree run with the Python that is there, without pip and without a network:
unpacks carried wheels of packages that are missing or too old, builds the core in place or takes
the carried one, writes the demo corpus where there is none, and says in a line each what is still
missing.

    python -m scripts.gpu.setup --result FILE [--carried gpu_carried]

Needs the standard library; `packaging` is taken from its carried wheel where it is missing. Other
parts find what was unpacked through PYTHONPATH (`site_folder`).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CARRIED = ROOT / "gpu_carried"
EXAMPLES = 120  # rows of the demo corpus
# The corpus that was carried, the one of `make demo`, or one that is made here.
CORPORA = [folder / "demo_data" for folder in (CARRIED, ROOT, ROOT / "build" / "gpu_work")]
TO_BUILD = ("setuptools>=77", "pybind11>=2.12")  # as pyproject.toml's build-system


def site_folder() -> Path:
    """Where wheels are unpacked for this Python."""
    return ROOT / "build" / "gpu_site" / (sys.implementation.cache_tag or "python")


def carried_wheels(folder: Path) -> dict[str, Path]:
    """Name of a package -> its carried wheel, of those that this Python can use."""
    from packaging.tags import sys_tags
    from packaging.utils import parse_wheel_filename

    usable, found = set(sys_tags()), {}
    for path in sorted(folder.glob("*.whl")):
        name, _, _, tags = parse_wheel_filename(path.name)
        if usable & tags:
            found[name] = path
    return found


def _find_packaging(folder: Path) -> None:
    """Reads `packaging`, which has no compiled part, out of its wheel where it is missing."""
    if importlib.util.find_spec("packaging") is None:
        sys.path += [str(path) for path in folder.glob("packaging-*.whl")]


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _needs(name: str) -> list[str]:
    """What a package that is there asks for, extras left out."""
    from packaging.requirements import Requirement

    return [text for text in metadata.requires(name) or () if (
        marker := Requirement(text).marker) is None or marker.evaluate({"extra": ""})]


def lacking(requirements: list[str]) -> list[str]:
    """Those of the requirements, and of what they need in turn, that are missing or too old."""
    from packaging.requirements import Requirement

    found, seen, queue = [], set(), list(requirements)
    while queue:
        text = queue.pop()
        if text in seen:
            continue
        seen.add(text)
        one = Requirement(text)
        version = _installed(one.name)
        if version is None or not one.specifier.contains(version, prereleases=True):
            found.append(f"{one.name}{one.specifier}")
        elif one.name != "torch":  # its own packages are no business of ours
            queue += _needs(one.name)
    return sorted(found)


def unpack(requirements: list[str], folder: Path) -> list[str]:
    """Unpacks the carried wheels of what lacks, until nothing that is carried lacks; their names.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    wheels, done, site = carried_wheels(folder), [], site_folder()
    site.mkdir(parents=True, exist_ok=True)
    if str(site) not in sys.path:
        sys.path.insert(0, str(site))
    while True:
        names = {canonicalize_name(Requirement(text).name) for text in lacking(requirements)}
        todo = sorted(name for name in names & wheels.keys() if wheels[name].name not in done)
        if not todo:
            return done
        for name in todo:
            with zipfile.ZipFile(wheels[name]) as file:
                file.extractall(site)
            done.append(wheels[name].name)
        importlib.invalidate_caches()


def core() -> Path:
    """Where the core for this Python is in the working tree."""
    return ROOT / "orchmllm" / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"


def carried_core(folder: Path) -> Path:
    """Where the folder of what is carried has the core for this Python, built from the sources of
    the working tree and from no others."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "cpp").iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return folder / "core" / digest.hexdigest()[:16] / core().name


def _cannot_compile() -> str | None:
    """What is missing to build the core."""
    compiler = (os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++").split()[0]
    if not shutil.which(compiler) and not shutil.which("c++"):
        return f"no C++ compiler ({compiler}, c++)"
    include = sysconfig.get_path("include")
    return None if Path(include, "Python.h").exists() else f"no Python.h in {include}"


def build(carried: Path = CARRIED) -> bool:
    """Builds the core in place if it is not there, and takes the carried one where it cannot be
    built; True if it was built. Raises RuntimeError that says what is missing for both."""
    newest = max(path.stat().st_mtime for path in (ROOT / "cpp").iterdir())
    fresh = core().exists() and core().stat().st_mtime > newest
    if not fresh and (missing := _cannot_compile()):
        if not (ready := carried_core(carried)).exists():
            raise RuntimeError(f"{missing}: the core cannot be built, and {carried} has none for "
                               "this Python and these sources")
        shutil.copyfile(ready, core())  # with the time of now
        fresh = True
    commands = ([] if fresh else ["build_ext", "--inplace"]) + (
        [] if _installed("orchmllm") else ["egg_info"])
    if not commands:
        return False
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", *commands], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (site_folder(), ROOT)))})
    if done.returncode:
        raise RuntimeError("the core was not built: " + done.stderr.strip()[-2000:])
    importlib.invalidate_caches()
    return not fresh


def demo_data() -> Path:
    """The first of CORPORA that is whole, else the last."""
    return next((path for path in CORPORA if (path / "data.jsonl").exists()), CORPORA[-1])


def make_demo_data() -> None:
    """Writes a small corpus where there is none. Raises CalledProcessError if that fails."""
    if not (demo_data() / "data.jsonl").exists():
        subprocess.run([sys.executable, str(ROOT / "scripts" / "make_demo_data.py"), "--out",
                        str(demo_data()), "--num-examples", str(EXAMPLES)], check=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, required=True, help="figures, as JSON")
    parser.add_argument("--carried", type=Path, default=CARRIED)
    args = parser.parse_args(argv)
    found = {"python": sys.version.split()[0], "unpacked": [], "missing": [], "built": False}

    def tell(**figures) -> None:
        found.update(figures)
        args.result.write_text(json.dumps(found), encoding="utf-8")

    _find_packaging(args.carried / "wheels")
    if importlib.util.find_spec("packaging") is None:
        print("error: `packaging` is missing and not carried: run scripts/gpu/carry.py first",
              file=sys.stderr)
        return 1
    tell(unpacked=unpack(list(TO_BUILD), args.carried / "wheels"))
    tell(built=build(args.carried))
    from orchmllm.models.families import versions

    needed = [*_needs("orchmllm"), "pytest", "pytest-timeout", "hypothesis", "jsonschema",
              "psutil", f"transformers{versions()}"]
    tell(unpacked=found["unpacked"] + unpack(needed, args.carried / "wheels"))
    tell(missing=lacking(needed))
    for text in found["missing"]:
        print(f"missing: {text}")
    import torch
    import transformers

    from orchmllm.plan.balance import balance

    make_demo_data()
    assert balance([5, 1, 4], num_ranks=2, policy="greedy").tolist() == [0, 1, 1]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    memory = torch.cuda.get_device_properties(0).total_memory if gpus else 0
    name = torch.cuda.get_device_name(0) if gpus else "CPU"
    tell(torch=torch.__version__, cuda=torch.version.cuda, transformers=transformers.__version__,
         gpus=gpus, memory_bytes=memory, device=name)
    print(f"Python {found['python']}, torch {torch.__version__}, {name}; unpacked "
          f"{len(found['unpacked'])} wheels, {len(found['missing'])} packages are missing")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
