"""Everything that this package does only on a GPU, in parts of at most a few minutes. It needs no
package registry and no network.

    python -m scripts.gpu [PART ...] [--minutes 9] [--out runs/gpu] [--tiny]     (or: make gpu)
    python -m scripts.gpu --list

`setup` comes first every time. Then the parts that are named, or all of them, as far as the minutes
go; what is left is said with the command that goes on. Each part adds its line to OUT/results.jsonl
(scripts/gpu/lines.py has the schema) as soon as it ends, so a kit that is killed keeps what was
done; all output is in OUT/log.txt, the table of all lines in OUT/summary.md. --tiny: sizes for a
CPU, where nothing else runs.

Exit code: 0 all parts that ran are ok, 1 one is not, 2 no GPU and no --tiny.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from scripts.gpu import lines, setup
from scripts.gpu.parts import PARTS, Part, Place

ROOT = setup.ROOT
SLOWER = 4  # times as long a part may take on a CPU, which others may share
TAIL = 12  # lines of the output of a part that failed, which are shown
GRACE_S = 10.0  # that a part gets to end after its time


def environment(tiny: bool) -> dict[str, str]:
    """Of the parts: the working tree and what was unpacked come first. Small operators are not
    divided over cores, which others may use."""
    path = [str(ROOT), str(setup.site_folder()), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false", **({"OMP_NUM_THREADS": "1"} if tiny else {}),
        **({} if {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys() else {
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})}


def commit() -> str | None:
    """Of the working tree, or as carry.py has noted it: a copy may be a repository of its own,
    which does not know that commit."""
    def git(*args: str) -> str | None:
        done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True)
        return None if done.returncode else done.stdout.strip()

    noted = setup.CARRIED / "COMMIT"
    carried = noted.read_text(encoding="utf-8").strip() if noted.exists() else None
    here = git("rev-parse", "HEAD") if (ROOT / ".git").exists() else None
    if here and carried and git("cat-file", "-e", carried.rstrip("+")) is None:
        return carried
    return here or carried


def execute(command: list[str], limit_s: float, place: Place) -> tuple[int | None, dict, str]:
    """(exit code, None if it took too long; its seconds; the output) of a command, whose output
    goes to the log as it comes. All processes that it has started end with it."""
    started, before, log = time.perf_counter(), os.times(), place.out / "log.txt"
    with log.open("ab") as file:
        start = file.tell()
        process = subprocess.Popen(command, cwd=ROOT, env=environment(place.tiny), stdout=file,
                                   stderr=subprocess.STDOUT)
        code, left = None, []
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            left = descendants(process.pid)
            process.terminate()  # a run ends its ranks
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        finally:
            if process.poll() is None:  # also where the kit itself is ended
                left += [*descendants(process.pid), process.pid]
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
    seconds, after = time.perf_counter() - started, os.times()
    cpu_s = sum(after[2:4]) - sum(before[2:4])  # of children that have ended
    with log.open("rb") as file:
        file.seek(start)
        return (code, {"seconds": round(seconds, 2), "cpu_s": round(cpu_s, 2)},
                file.read().decode(errors="replace"))


def descendants(pid: int) -> list[int]:
    """The processes that a process and those that it started have started. Ranks have sessions of
    their own, so a process group does not hold them."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    children = [int(child) for child in path.read_text().split()] if path.exists() else []
    return [*children, *(one for child in children for one in descendants(child))]


def figures_of(name: str, part: Part, place: Place, output: str) -> tuple[dict, list[str]]:
    """(the figures of a part, why they cannot be used)."""
    try:
        found = part.figures(place.result(name), output)
    except (OSError, ValueError, LookupError, TypeError) as e:
        return {}, [f"no figures: {type(e).__name__}: {e}"]
    wrong = lines.figure_problems(name, found, whole=False)
    return ({}, wrong) if wrong else (found, [])


def run_part(name: str, place: Place, limit_s: float, device: str | None) -> dict:
    """Runs a part and returns its line."""
    part, started = PARTS[name], datetime.now(UTC).isoformat(timespec="seconds")
    place.result(name).unlink(missing_ok=True)
    shutil.rmtree(place.work / name, ignore_errors=True)  # an earlier run of the part
    command = part.command(place, name)
    code, seconds, output = execute([sys.executable, *command], limit_s, place)
    figures, problems = figures_of(name, part, place, output)
    status = "ok" if code == 0 else "timeout" if code is None else "failed"
    if code is None:
        problems.insert(0, f"it took longer than {limit_s:.0f} s")
    elif code:
        told = [text for text in output.splitlines() if text.strip()]
        problems.insert(0, f"exit code {code}: {told[-1][:300] if told else 'no output'}")
    if status == "ok" and not problems:
        problems = lines.figure_problems(name, figures, whole=True)
    if status == "ok" and problems:
        status = "failed"
    if status == "ok" and figures.get("passed") == 0:
        status = "nothing to do"
    if status in ("failed", "timeout"):
        print("\n".join(f"    {text}" for text in output.splitlines()[-TAIL:]), flush=True)
    return {"part": name, "status": status, "started": started, **seconds,
            "limit_s": float(limit_s), "command": ["python", *map(place.short, command)],
            "exit_code": code, "tiny": place.tiny, "commit": commit(),
            "device": device or figures.get("device"),
            "problems": [*map(place.short, problems)], "figures": figures}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all, in order")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this command (9)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--list", action="store_true", help="the parts and their seconds")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.parts) - set(PARTS)):
        parser.error(f"{', '.join(unknown)}: no such part; there are {', '.join(PARTS)}")
    if args.minutes <= 0:
        parser.error(f"--minutes {args.minutes:g}: must be above 0")
    return args


def main(argv: list[str]) -> int:
    args, started = parse(argv), time.monotonic()
    if args.list:
        print("\n".join(f"{name:18s}{part.limit_s:4.0f} s  {part.what}"
                        for name, part in PARTS.items()))
        return 0
    place = Place(args.out.resolve(), args.tiny)
    for folder in (place.out, place.work):
        folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(place.drawn, ignore_errors=True)  # of another version, or of other sizes
    results, device, failed = place.out / "results.jsonl", None, []
    todo = [name for name in PARTS if name != "setup" and (name in args.parts or not args.parts)]
    for name in ["setup", *todo]:
        left = 60 * args.minutes - (time.monotonic() - started)
        wanted = PARTS[name].limit_s * (SLOWER if args.tiny else 1)
        limit_s = min(wanted, left)
        if name != "setup" and limit_s < PARTS[name].limit_s / 2:
            print(f"{left:.0f} s are left, too few for {name}. To go on: python -m scripts.gpu "
                  f"{' '.join(todo[todo.index(name):])}")
            break
        line = run_part(name, place, limit_s, device)
        lines.append(results, line)
        (place.out / "summary.md").write_text(lines.table(lines.read(results)), encoding="utf-8")
        print(f"{name}: {line['status']} in {line['seconds']:.0f} s"
              + "".join(f"; {text}" for text in line["problems"][:1]), flush=True)
        for text in line["figures"].get("missing", []):
            print(f"missing: {text}", flush=True)
        failed += [name] * (line["status"] not in ("ok", "nothing to do" if args.tiny else "ok"))
        if name == "setup":
            device = line["device"]
            if failed:
                return 1
            if not line["figures"]["gpus"] and not args.tiny:
                print("no GPU found: this needs one CUDA device that torch can use, or --tiny",
                      file=sys.stderr)
                return 2
    print((place.out / "summary.md").read_text(encoding="utf-8"))
    print(f"written: {results}")
    return 1 if failed else 0


if __name__ == "__main__":
    for asked in (signal.SIGINT, signal.SIGTERM):  # they end the part that runs, too
        signal.signal(asked, lambda number, _: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
