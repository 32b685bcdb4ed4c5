"""Collects what a machine with a GPU but without a package registry may lack, into a folder that
travels with the working tree: wheels for its Python, the core if this Python is of its version, the
demo corpus and the commit's name.

    python scripts/gpu/carry.py [--python 3.12] [--out gpu_carried] [--max-mib 50]

torch and numpy are not carried: such a machine has them. Nothing is installed: scripts/gpu/setup.py
unpacks there what is missing, and transformers where it is not of the version that whole models
need.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from scripts.gpu.setup import CARRIED, EXAMPLES, build, carried_core, core  # noqa: E402

# pip resolves what these need. jsonschema, hypothesis and pytest: for the tests.
WANTED = ("pydantic", "soundfile", "soxr", "pillow", "packaging", "setuptools", "pybind11",
          "pytest", "pytest-timeout", "hypothesis", "jsonschema", "psutil", "transformers")
BY_ITSELF = ("accelerate",)  # asks for torch
THERE = ("numpy",)  # comes with transformers, and is large
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")


def wheels(python: str, machine: str, out: Path) -> list[str]:
    """Fetches the wheels; their names. Raises SystemExit with pip's message where one is not to be
    had for this Python."""
    with tempfile.TemporaryDirectory() as folder:
        for names in (WANTED, ("--no-deps", *BY_ITSELF)):
            done = subprocess.run(
                [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
                 "--only-binary=:all:", "--implementation", "cp", "--python-version", python,
                 *(f"--platform={p}_{machine}" for p in PLATFORMS), "--dest", folder,
                 "--constraint", str(ROOT / "constraints.txt"), *names],
                capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"error: pip found no wheels for Python {python} on {machine}:\n"
                                 f"{done.stderr.strip()}")
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        for wheel in Path(folder).glob("*.whl"):
            if wheel.name.split("-")[0] not in THERE:
                shutil.copy(wheel, out)
    return sorted(p.name for p in out.iterdir())


def carry_core(python: str, machine: str, out: Path) -> None:
    """Copies the core for a machine without a compiler, which only this Python could build."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.rmtree(out / "core", ignore_errors=True)
    if (python, machine) != (here, platform.machine()):
        print(f"the core is not carried: this is Python {here} on {platform.machine()}. With "
              f"Python {python} on {machine} this command carries it; else the other machine "
              "needs a C++ compiler and Python.h")
        return
    build()
    carried_core(out).parent.mkdir(parents=True)
    shutil.copyfile(core(), carried_core(out))


def commit() -> str:
    """The commit of the working tree, with `+` where files differ from it."""
    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=ROOT, check=True, capture_output=True,
                              text=True).stdout.strip()

    return git("rev-parse", "HEAD") + "+" * bool(git("status", "--porcelain", "-uno"))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="version of the Python there (3.12)")
    parser.add_argument("--machine", default="x86_64", help="its processor (x86_64)")
    parser.add_argument("--out", type=Path, default=CARRIED)
    parser.add_argument("--max-mib", type=float, default=50.0)
    args = parser.parse_args(argv)
    names = wheels(args.python, args.machine, args.out / "wheels")
    carry_core(args.python, args.machine, args.out)
    subprocess.run([sys.executable, str(ROOT / "scripts" / "make_demo_data.py"), "--out",
                    str(args.out / "demo_data"), "--num-examples", str(EXAMPLES)], check=True)
    (args.out / "COMMIT").write_text(commit() + "\n", encoding="utf-8")
    size = sum(p.stat().st_size for p in args.out.rglob("*") if p.is_file()) / 2**20
    print(f"{args.out}: {len(names)} wheels for Python {args.python}, {EXAMPLES} examples, "
          f"{size:.1f} MiB")
    if size > args.max_mib:
        print(f"error: {size:.1f} MiB are more than --max-mib {args.max_mib:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
