"""Saves in the middle of a run, kills it, and resumes it: what the save costs in time and memory of
the host, and that the run goes on where it was.

    python -m scripts.gpu.resume --result FILE --work FOLDER --drawn FOLDER --tokens N [--tiny]
        section.key=value ...

Both runs are scripts.gpu.steps in a process of its own. Exit code 1 if the run did not go on at the
checkpoint, or the losses of the steps that ran twice differ by more than rounding.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

STEPS, SAVED_AT = 12, 4
TOLERANCE = 1e-2  # of a loss in bfloat16 whose sums may run in another order


class Run:
    """A run in a process of its own, with what it has told."""

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        self.log, self.said = args.work / f"{name}.jsonl", args.work / f"{name}.txt"
        self.started = time.monotonic()
        self.resident: list[tuple[float, int]] = []  # time, bytes
        with self.said.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "scripts.gpu.steps", "--result",
                 str(args.work / f"{name}.json"), f"--log={self.log}", f"--tokens={args.tokens}",
                 f"--work={args.drawn}", "--model=half-b", *["--tiny"] * args.tiny,
                 f"--steps={STEPS}", f"run.dir={args.work / 'run'}",
                 f"checkpoint.every_steps={SAVED_AT}", *args.overrides],
                stdout=output, stderr=subprocess.STDOUT)

    def steps(self) -> list[dict]:
        text = self.log.read_text(encoding="utf-8") if self.log.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True)
                if line.endswith("\n")]

    def follow(self, until=lambda: False) -> None:
        """Notes the memory of the process until it ends, or `until` holds."""
        while self.process.poll() is None and not until():
            status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
            resident = [line.split()[1] for line in status.splitlines() if "VmRSS" in line]
            self.resident += [(time.monotonic(), 1024 * int(value)) for value in resident]
            time.sleep(0.02)

    def saved(self) -> bool:
        return f"saved step {SAVED_AT}: " in self.said.read_text(encoding="utf-8",
                                                                 errors="replace")


def between(steps: list[dict]) -> dict[int, float]:
    """Step -> seconds between it and the one before that are not its own."""
    return {b["step"]: b["at"] - a["at"] - b["step_s"]
            for a, b in zip(steps, steps[1:], strict=False)}


def kill(run: Run) -> dict:
    """Waits for a checkpoint and a step after it, and kills the run."""
    run.follow(until=lambda: run.saved() and len(run.steps()) > SAVED_AT + 1)
    saved_at = time.monotonic()
    if run.process.poll() is not None:
        raise RuntimeError(f"the run ended before it was killed:\n{run.said.read_text()[-2000:]}")
    run.process.kill()
    run.process.wait()
    steps = run.steps()
    pause = between(steps)
    begun = steps[SAVED_AT - 1]["at"]
    return {
        "step_s": median(s["step_s"] for s in steps[1:SAVED_AT]),
        "save_s": saved_at - begun,
        "stall_s": max(pause[SAVED_AT] - median(v for k, v in pause.items() if k < SAVED_AT), 0.0),
        "rss_before_bytes": max(b for at, b in run.resident if at <= begun),
        "rss_saving_bytes": max(b for at, b in run.resident if at > begun)}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--drawn", type=Path, required=True, help="of model and rows")
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args(argv)
    args.work.mkdir(parents=True)
    first = Run(args, "killed")
    try:
        figures = kill(first)
    finally:
        first.process.kill()
    folder = args.work / "run" / "checkpoints" / f"step_{SAVED_AT:08d}"  # the next may be half done
    figures["saved_bytes"] = sum(p.stat().st_size for p in folder.iterdir())
    args.result.write_text(json.dumps(figures), encoding="utf-8")
    second = Run(args, "resumed")
    try:
        second.follow()
    finally:
        second.process.kill()
        code = second.process.wait()
    steps, before = second.steps(), {s["step"]: s["loss"] for s in first.steps()}
    if code or not steps:
        raise RuntimeError(f"the resumed run ended with {code}:\n{second.said.read_text()[-2000:]}")
    twice = [abs(s["loss"] / before[s["step"]] - 1) for s in steps if s["step"] in before]
    figures |= {"resumed_at_step": steps[0]["step"], "loss_difference": max(twice),
                "resume_s": steps[0]["at"] - second.started - steps[0]["step_s"]}
    args.result.write_text(json.dumps(figures), encoding="utf-8")
    print(json.dumps(figures))
    if steps[0]["step"] != SAVED_AT or steps[-1]["step"] != STEPS - 1:
        print(f"error: it was saved after {SAVED_AT} steps and went on with step "
              f"{steps[0]['step']}, up to {steps[-1]['step']}", file=sys.stderr)
        return 1
    if max(twice) > TOLERANCE:
        print(f"error: the losses of steps that ran twice differ by {max(twice):.1e}",
              file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
