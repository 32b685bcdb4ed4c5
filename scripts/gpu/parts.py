"""The parts of the kit: what each runs, how long it may take, and where its figures are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.gpu.setup import ROOT, demo_data

GPU_TESTS = ["tests/models/test_attention.py", "tests/models/test_loss_head.py",
             "tests/runtime/test_measured.py", "tests/e2e/test_no_sync.py",
             "tests/e2e/test_whole_waits.py"]
CHOICES = ("none", "selective", "full")
TOKENS, TINY_TOKENS = 16384, 512
TINY_BENCH = ["--ranks", "3", "--batch-size", "4", "--repeat", "1", "--chunk-rows", "32"]


@dataclass(frozen=True)
class Place:
    """out: what is kept. tiny: sizes for a CPU."""

    out: Path
    tiny: bool

    @property
    def work(self) -> Path:
        """For what is not kept: run folders, checkpoints."""
        return ROOT / "build" / "gpu_work"

    @property
    def drawn(self) -> Path:
        """Models and rows of the parts, see drawn.py."""
        return self.work / "drawn"

    def short(self, text: str) -> str:
        """The text without where the kit lies on this machine: a line may be published."""
        return text.replace(str(self.out), "OUT").replace(f"{ROOT}/", "")

    def result(self, name: str) -> Path:
        """Where the figures of a part are."""
        return self.work / f"{name}.json"


@dataclass(frozen=True)
class Part:
    """command: arguments of Python. figures: (file of the part, its output) -> its figures; raises
    ValueError, LookupError or OSError where there are none."""

    what: str
    limit_s: float
    command: Callable[[Place, str], list[str]]
    figures: Callable[[Path, str], dict] = lambda path, output: json.loads(
        path.read_text(encoding="utf-8"))


def _overrides(place: Place, checkpointing: str) -> list[str]:
    """Of recipes/mllm_1gpu.yaml. fsdp.memory_gb=0: a run is not refused by a prediction."""
    return ["fsdp.memory_gb=0", f"fsdp.activation_checkpointing={checkpointing}",
            f"fsdp.loss_chunk_rows={64 if place.tiny else 2048}",
            f"data.num_workers={1 if place.tiny else 8}"]


def _steps(model: str, checkpointing: str, *overrides: str, traced: bool = False,
           at_once: bool = False) -> Callable[[Place, str], list[str]]:
    def command(place: Place, part: str) -> list[str]:
        return ["-m", "scripts.gpu.steps", "--result", str(place.result(part)),
                f"--work={place.drawn}", f"--model={model}", *["--tiny"] * place.tiny,
                *["--at-once"] * at_once, f"--tokens={TINY_TOKENS if place.tiny else TOKENS}",
                f"--steps={6 if place.tiny else 14}",
                *[f"--trace={place.out / f'trace_{part}.json.gz'}"] * traced,
                *_overrides(place, checkpointing), f"run.dir={place.work / part}",
                "run.resume=never", "checkpoint.every_steps=-1", *overrides]
    return command


def _script(name: str) -> Callable[[Place, str], list[str]]:
    """A module of the kit, which writes its figures itself."""
    return lambda place, part: [
        "-m", f"scripts.gpu.{name}", "--result", str(place.result(part)),
        *["--tiny"] * place.tiny]


def _resume(place: Place, part: str) -> list[str]:
    return ["-m", "scripts.gpu.resume", "--result", str(place.result(part)),
            f"--work={place.work / part}", f"--drawn={place.drawn}", *["--tiny"] * place.tiny,
            f"--tokens={TINY_TOKENS if place.tiny else TOKENS}", *_overrides(place, "full")]


def _on_demo_data(command: str, *overrides: str) -> Callable[[Place, str], list[str]]:
    """A command of orchmllm with the recipe of the steps, on the demo corpus and its model."""
    return lambda place, part: [
        "-m", "orchmllm", command, "recipes/mllm_1gpu.yaml", *_overrides(place, "full"),
        f"model.config={demo_data() / 'model'}", f"data.path={demo_data()}",
        f"data.index_dir={place.work / 'index'}", f"run.dir={place.work / part}",
        "train.batch_size=" + ("2" if place.tiny else "16"), *overrides]


def _corpus_figures(path: Path, output: str) -> dict:
    """Medians over the steps after the first three of the run whose folder is beside `path`."""
    from statistics import median

    text = (path.with_suffix("") / "metrics.jsonl").read_text(encoding="utf-8")
    rows = [row for row in map(json.loads, text.splitlines()) if row["step"] >= 3]
    return {"steps": len(rows), **{key: median(row[key] for row in rows) for key in (
        "step_s", "data_wait_s", "tokens_per_s")}}


def _tests(place: Place, part: str) -> list[str]:
    return ["-m", "pytest", "-q", "-rs", "-m", "gpu", "-p", "no:cacheprovider", *GPU_TESTS]


def _test_figures(path: Path, output: str) -> dict:
    """Of pytest's last line."""
    last = [text for text in output.splitlines() if re.search(r" in [\d.]+s", text)][-1]
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (\w+)", last)}
    return {"passed": counts.get("passed", 0), "skipped": counts.get("skipped", 0),
            "failed": counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)}


def _bench(place: Place, part: str) -> list[str]:
    sizes = ["--device", "cpu", *TINY_BENCH] if place.tiny else ["--device", "cuda"]
    return ["scripts/bench_gpu.py", *sizes, "--json", str(place.result(part)),
            "--out", str(place.out / "measured.json")]


def _bench_figures(path: Path, output: str) -> dict:
    """The gain by mix, and the MFU by phase of the first."""
    mixes = json.loads(path.read_text(encoding="utf-8"))["mixes"]
    phases = next(iter(mixes.values()))["phases"]
    return {"gain": {mix: found["none_over_balanced"] for mix, found in mixes.items()},
            "mfu": {phase: found["mfu"] for phase, found in phases.items()}}


PARTS = {
    "setup": Part("unpacks wheels, builds the core, says what is missing", 240,
                  lambda place, part: ["-m", "scripts.gpu.setup", "--result",
                                       str(place.result(part))]),
    "tests": Part("pytest -m gpu", 120, _tests, _test_figures),
    "gradients": Part("gradients, plain and compiled, beside float64 on the CPU", 150,
                      _script("gradients")),
    "doctor": Part("the machine and the recipe", 90, _on_demo_data("doctor"),
                   lambda path, output: {}),
    "self-test": Part("the doctor's runs of a tiny model", 120,
                      lambda place, part: ["-m", "orchmllm", "doctor", "--self-test"],
                      lambda path, output: {}),
    **{f"train-{choice}": Part(f"steps of drawn sizes, recomputing {choice}", 140, _steps(
        "7b", choice, traced=choice == "none")) for choice in CHOICES},
    "train-at-once": Part("train-none, where each step is read before the next one begins", 140,
                          _steps("7b", "none", traced=True, at_once=True)),
    **{f"compiled-{choice}": Part(f"the same, blocks compiled, recomputing {choice}", 200, _steps(
        "7b", choice, "fsdp.compile=true", traced=choice == "none")) for choice in CHOICES},
    "whole": Part("the same with Qwen3-VL", 140, _steps("qwen3-vl", "none", traced=True)),
    "resume": Part("save, kill, resume", 200, _resume),
    "corpus": Part("orchmllm train on the demo corpus", 90, _on_demo_data(
        "train", "run.resume=never", "train.num_steps=8", "train.warmup_steps=2",
        "checkpoint.every_steps=-1"), _corpus_figures),
    "drop-in": Part("BalancedDataLoader and balance_encoders with Qwen2-VL of transformers", 90,
                    _script("drop_in")),
    "bench": Part("what balancing gains on simulated ranks", 240, _bench, _bench_figures),
}
