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
# Widths of a 7B LLM with as many layers as leave room on 80 GB for nothing recomputed; a step
# holds at least TOKENS.
BLOCKS_7B = [
    "model.vision.num_layers=6", "model.audio.num_layers=4", "model.llm.vocab_size=152064",
    "model.llm.num_layers=4", "model.llm.hidden_size=3584", "model.llm.intermediate_size=18944",
    "model.llm.num_heads=28", "model.llm.num_kv_heads=4", "fsdp.loss_chunk_rows=2048"]
TOKENS, TINY_TOKENS = 16384, 512
# About half a billion parameters, so that a checkpoint is written in seconds.
HALF_B = [
    "model.vision.num_layers=4", "model.audio.num_layers=4", "model.llm.vocab_size=32768",
    "model.llm.num_layers=4"]
TINY = [  # of recipes/mllm_1gpu.yaml
    *(f"model.{phase}.{key}" for phase in ("vision", "audio", "llm")
      for key in ("num_layers=2", "hidden_size=64", "intermediate_size=128", "num_heads=4")),
    "model.llm.num_kv_heads=2", "model.llm.vocab_size=512", "model.vision.max_side=112",
    "fsdp.loss_chunk_rows=64", "data.num_workers=1"]
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


def _overrides(place: Place, large: list[str]) -> list[str]:
    """Of recipes/mllm_1gpu.yaml. fsdp.memory_gb=0: a run is not refused by a prediction."""
    return [*(TINY if place.tiny else large), "fsdp.memory_gb=0"]


def _script(name: str) -> Callable[[Place, str], list[str]]:
    """A module of the kit, which writes its figures itself."""
    return lambda place, part: [
        "-m", f"scripts.gpu.{name}", "--result", str(place.result(part)),
        *["--tiny"] * place.tiny]


def _train(choice: str, compiled: bool) -> Callable[[Place, str], list[str]]:
    def command(place: Place, part: str) -> list[str]:
        trace = [f"--trace={place.out / f'trace_{part}.json.gz'}"] * (choice == "none")
        return ["-m", "scripts.gpu.steps", "--result", str(place.result(part)),
                f"--tokens={TINY_TOKENS if place.tiny else TOKENS}",
                f"--steps={6 if place.tiny else 14}", *trace, *_overrides(place, BLOCKS_7B),
                f"run.dir={place.work / part}", "run.resume=never", "checkpoint.every_steps=-1",
                f"fsdp.activation_checkpointing={choice}",
                f"fsdp.compile={str(compiled).lower()}"]
    return command


def _whole(place: Place, part: str) -> list[str]:
    tokens = TINY_TOKENS if place.tiny else TOKENS
    return ["-m", "scripts.gpu.steps", "--result", str(place.result(part)), f"--tokens={tokens}",
            f"--steps={6 if place.tiny else 14}", f"--whole={place.work / part}",
            f"--trace={place.out / f'trace_{part}.json.gz'}", *["--tiny"] * place.tiny,
            f"fsdp.loss_chunk_rows={64 if place.tiny else 2048}", "fsdp.memory_gb=0",
            f"data.num_workers={1 if place.tiny else 8}",
            f"run.dir={place.work / part / 'run'}", f"data.index_dir={place.work / part / 'index'}",
            "checkpoint.every_steps=-1", "fsdp.activation_checkpointing=none"]


def _resume(place: Place, part: str) -> list[str]:
    return ["-m", "scripts.gpu.resume", "--result", str(place.result(part)),
            f"--work={place.work / part}", f"--tokens={TINY_TOKENS if place.tiny else TOKENS}",
            *_overrides(place, HALF_B), "fsdp.activation_checkpointing=full"]


def _corpus(place: Place, part: str) -> list[str]:
    return ["-m", "orchmllm", "train", "recipes/mllm_1gpu.yaml", *_overrides(place, HALF_B),
            f"run.dir={place.work / part}", "run.resume=never", f"data.path={demo_data()}",
            f"data.index_dir={place.work / 'index'}", "train.num_steps=8", "train.warmup_steps=2",
            "checkpoint.every_steps=-1", "fsdp.activation_checkpointing=full",
            "train.batch_size=" + ("2" if place.tiny else "16")]


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


def _doctor(place: Place, part: str) -> list[str]:
    return ["-m", "orchmllm", "doctor", "recipes/mllm_1gpu.yaml", *_overrides(place, HALF_B),
            f"run.dir={place.work / part}", f"data.path={demo_data()}",
            f"data.index_dir={place.work / 'index'}", "fsdp.activation_checkpointing=full"]


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
    "doctor": Part("the machine and the recipe", 90, _doctor, lambda path, output: {}),
    "self-test": Part("the doctor's runs of a tiny model", 120,
                      lambda place, part: ["-m", "orchmllm", "doctor", "--self-test"],
                      lambda path, output: {}),
    **{f"train-{choice}": Part(f"steps of drawn lengths, recomputing {choice}", 100,
                               _train(choice, False)) for choice in CHOICES},
    **{f"compiled-{choice}": Part(f"the same, blocks compiled, recomputing {choice}", 180,
                                  _train(choice, True)) for choice in CHOICES},
    "whole": Part("steps of a model of transformers, Qwen3-VL", 120, _whole),
    "resume": Part("save, kill, resume", 150, _resume),
    "corpus": Part("orchmllm train on the demo corpus", 90, _corpus, _corpus_figures),
    "drop-in": Part("BalancedDataLoader and balance_encoders with Qwen2-VL of transformers", 90,
                    _script("drop_in")),
    "bench": Part("what balancing gains on simulated ranks", 240, _bench, _bench_figures),
}
