"""The lines of results.jsonl, one a part, and the table made of them. FIGURES and LINE are the
schema: `problems_of` checks a line against it, with the standard library alone.

    python -m scripts.gpu.lines FILE     checks every line of a results.jsonl; 1 if one is wrong
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

NUMBER, TEXT, COUNT, FLAG, LIST, SOME = "number", "text", "count", "flag", "list", "number or null"
SOME_TEXT = "text or null"
STATUS = ("ok", "failed", "timeout", "nothing to do")  # the last: no test runs on a CPU
LINE = {"part": TEXT, "status": TEXT, "started": TEXT, "seconds": NUMBER, "cpu_s": NUMBER,
        "limit_s": NUMBER, "command": LIST, "exit_code": "count or null", "tiny": FLAG,
        "commit": SOME_TEXT, "device": SOME_TEXT, "problems": LIST, "figures": "figures"}
STEPS = {
    "tokens_min": COUNT, "tokens_mean": NUMBER,  # LLM tokens of a step
    "steps": COUNT,  # that the medians are of
    "step_s": NUMBER, "predicted_step_s": NUMBER, "predicted_for": TEXT, "first_step_s": NUMBER,
    "peak_bytes": NUMBER, "peak_of": TEXT, "predicted_peak_bytes": NUMBER,
    "mfu": SOME, "predicted_mfu": NUMBER, "tokens_per_s": NUMBER, "trace": SOME_TEXT,
    "idle_share": SOME, "longest": LIST}  # of the traced step, see trace.py
GRADIENTS = ("float32", "bfloat16", "bfloat16 compiled")
# What a part that is ok has to tell; of the others any of it. Names end in their unit.
FIGURES = {
    "setup": {"python": TEXT, "torch": TEXT, "cuda": SOME_TEXT, "transformers": TEXT,
              "gpus": COUNT, "device": TEXT, "memory_bytes": COUNT, "unpacked": LIST,
              "missing": LIST, "built": FLAG},
    "tests": {"passed": COUNT, "failed": COUNT, "skipped": COUNT},
    # Of each dtype the largest error of a submodule's gradient beside float64 on the CPU.
    "gradients": {"errors": {kind: NUMBER for kind in GRADIENTS}},
    "doctor": {}, "self-test": {},
    **{f"train-{choice}": STEPS for choice in ("none", "at-once", "selective", "full")},
    **{f"compiled-{choice}": STEPS for choice in ("none", "selective", "full")},
    "whole": STEPS,
    "resume": {"saved_bytes": COUNT, "save_s": NUMBER, "stall_s": NUMBER, "step_s": NUMBER,
               "resumed_at_step": COUNT, "loss_difference": NUMBER, "rss_before_bytes": COUNT,
               "rss_saving_bytes": COUNT, "resume_s": NUMBER},
    "corpus": {"steps": COUNT, "step_s": NUMBER, "data_wait_s": NUMBER, "tokens_per_s": NUMBER},
    "drop-in": {"loss_difference": NUMBER, "plain_step_s": NUMBER, "balanced_step_s": NUMBER,
                "parameters": COUNT},
    "bench": {"gain": {"natural": NUMBER, "omni": NUMBER},
              "mfu": {"vision": SOME, "audio": SOME, "llm": SOME}},
}


def _fits(value: object, kind: str) -> bool:
    """Whether a value is of a kind of the schema; a number is finite."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind.endswith(" or null") and value is None:
        return True
    return {"number": number and abs(value) < float("inf"), "text": isinstance(value, str),
            "count": number and isinstance(value, int), "flag": isinstance(value, bool),
            "list": isinstance(value, list) and all(isinstance(x, str) for x in value),
            "figures": isinstance(value, dict)}[kind.removesuffix(" or null")]


def _keys(found: dict, wanted: dict, where: str, whole: bool) -> list[str]:
    """What is wrong with the keys and values of an object. whole: every key has to be there."""
    wrong = [f"{where}{name} is missing" for name in wanted if whole and name not in found]
    for name, value in found.items():
        kind = wanted.get(name)
        if kind is None:
            wrong.append(f"{where}{name} is not in the schema")
        elif isinstance(kind, dict):
            wrong += (_keys(value, kind, f"{where}{name}.", whole) if isinstance(value, dict)
                      else [f"{where}{name} is {value!r}, not an object"])
        elif not _fits(value, kind):
            wrong.append(f"{where}{name} is {value!r}, not a {kind}")
    return wrong


def figure_problems(part: str, figures: object, whole: bool) -> list[str]:
    """What is wrong with the figures of a part. whole: the part ended well, so all are needed."""
    if part not in FIGURES or not isinstance(figures, dict):
        return [f"part {part!r} with figures {figures!r} is not in the schema"]
    return _keys(figures, FIGURES[part], "figures.", whole)


def problems_of(line: object) -> list[str]:
    """What is wrong with one parsed line, as sentences; nothing if it fits the schema."""
    if not isinstance(line, dict):
        return [f"a line is {line!r}, not an object"]
    wrong = _keys(line, LINE, "", True)
    if wrong:
        return wrong
    if line["status"] not in STATUS:
        wrong.append(f"status is {line['status']!r}, not one of {', '.join(STATUS)}")
    if line["status"] == "ok" and line["problems"]:
        wrong.append(f"status is ok, but there are problems: {line['problems']}")
    return wrong + figure_problems(line["part"], line["figures"], line["status"] == "ok")


def append(path: Path, line: dict) -> None:
    """Adds a line, on the disk before it returns. Raises ValueError for one that is not of the
    schema."""
    if wrong := problems_of(line):
        raise ValueError(f"{line.get('part')}: {'; '.join(wrong)}")
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[dict]:
    """The lines of a file; of a part that ran again, all of them."""
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


def _number(value: float | None, scale: float, digits: int) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"


def table(lines: Iterable[dict]) -> str:
    """The last line of each part, as Markdown. Gain: of a run, its speed in tokens beside
    train-none; of bench, what balancing saves on the simulated ranks."""
    last = {line["part"]: line for line in lines}
    plain = last.get("train-none", {}).get("figures", {}).get("tokens_per_s")
    out = ["| part | status | s | step s: predicted | measured | peak GB: predicted | measured | "
           "MFU %: predicted | measured | gain | else |", "|" + "---|" * 11]
    for name, line in last.items():
        f, cells = line["figures"], ["-"] * 7
        if "step_s" in f and "predicted_step_s" in f:
            cells = [_number(f["predicted_step_s"], 1, 3), _number(f["step_s"], 1, 3),
                     _number(f["predicted_peak_bytes"], 1e-9, 2), _number(f["peak_bytes"], 1e-9, 2),
                     _number(f["predicted_mfu"], 100, 1), _number(f["mfu"], 100, 1),
                     f"{f['tokens_per_s'] / plain:.2f}x" if plain else "-"]
        elif name == "bench" and "gain" in f:
            cells[5] = ", ".join(f"{k} {_number(v, 100, 1)}" for k, v in f["mfu"].items())
            cells[6] = ", ".join(f"{mix} {gain:.2f}x" for mix, gain in f["gain"].items())
        out.append(f"| {name} | {line['status']} | {line['seconds']:.0f} | "
                   + " | ".join(cells) + f" | {_rest(line)} |")
    return "\n".join(out) + "\n"


def _rest(line: dict) -> str:
    """The figures of a part that have no column, or why it failed."""
    if line["problems"]:
        return line["problems"][0].replace("|", "/")
    f = line["figures"]
    if "predicted_for" in f:
        idle = f.get("idle_share")
        return (f"predicted for {f['predicted_for']}; peak of {f['peak_of']}"
                + (f"; idle {idle:.1%}" if idle is not None else ""))
    if line["part"] in ("setup", "bench"):
        return "missing: " + ", ".join(f["missing"]) if f.get("missing") else ""
    flat = {k: v for k, v in f.items() if not isinstance(v, dict)} | f.get("errors", {})
    return ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}"
                     for k, v in flat.items())


def main(argv: list[str]) -> int:
    found = read(Path(argv[0]))
    wrong = [(n, problems_of(line)) for n, line in enumerate(found, 1)]
    for n, problems in wrong:
        for problem in problems:
            print(f"{argv[0]}:{n}: {problem}")
    print(f"{argv[0]}: {len(found)} lines, {sum(bool(p) for _, p in wrong)} wrong")
    return int(any(p for _, p in wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
