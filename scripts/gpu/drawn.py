"""Models without weights, and rows for them whose media and texts have sizes that are drawn from
the paper's mix; steps of them on one rank, and what is predicted of these. Used by steps.py,
gradients.py and rates.py."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image

from orchmllm.config.recipe import Recipe
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.sampler import GlobalSampler, make_sampler
from orchmllm.launch import World
from orchmllm.models.gpus import kind_of
from orchmllm.models.whole_flops import plan_spec
from orchmllm.plan.assign import PHASES
from orchmllm.plan.layout import BatchLayout
from orchmllm.plan.step import StepPlan, plan_step
from orchmllm.sharding.loads import loads_of
from orchmllm.sharding.memory import MemoryModel
from orchmllm.tools.compose.drawn import shapes, write_drawn
from orchmllm.tools.predict.hardware import cluster
from orchmllm.tools.predict.step_time import timed, work_of
from orchmllm.tools.predict.workload import sample_headers
from scripts.gpu.setup import ROOT
from tests.lib.processors import write_processor
from tests.lib.tokenizers import write_byte_tokenizer

# Layers, width, width of the MLP and heads of the LLM, of the vision tower and of the audio tower;
# tokens, and the LLM's heads of keys and values.
COMPOSITIONS = {
    # Widths of a 7B LLM with as many layers as leave room on 80 GB for nothing recomputed.
    "7b": ((4, 3584, 18944, 28), (6, 1024, 4096, 16), (4, 768, 3072, 12), 152_064, 4),
    # About half a billion parameters, so that a checkpoint is written in seconds.
    "half-b": ((4, 1536, 8960, 12), (4, 1024, 4096, 16), (4, 768, 3072, 12), 32_768, 2),
    # As many layers as models of this size have, for scripts/bench_gpu.py on a CPU.
    "small": ((80, 128, 464, 8), (45, 64, 256, 4), (48, 64, 256, 4), 2048, 1),
    "tiny": ((2, 64, 128, 4), (2, 64, 128, 4), (2, 64, 128, 4), 512, 2)}
MODELS = ("7b", "half-b", "qwen3-vl")
TINY_QWEN = {"text_config": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
                             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512},
             "vision_config": {"hidden_size": 64, "intermediate_size": 128, "num_heads": 4,
                               "out_hidden_size": 64}}
ROWS, TINY_ROWS = 1536, 192
SMALLER = 8  # times, of the sizes of tiny rows


def write(folder: Path, name: str, tiny: bool) -> tuple[Path, Path]:
    """(Folder of one of MODELS, file of rows), below `folder`; rows that are there are kept."""
    model, rows = folder / f"model_{name}", folder / ("images" if name == "qwen3-vl" else "media")
    shutil.rmtree(model, ignore_errors=True)
    rows.mkdir(parents=True, exist_ok=True)
    if name == "qwen3-vl":
        write_qwen(model, tiny)
    else:
        write_composition(model, "tiny" if tiny else name, write_byte_tokenizer(rows))
    if not (rows / "rows.jsonl").exists():
        write_rows(rows, TINY_ROWS if tiny else ROWS, SMALLER if tiny else 1,
                   ("audio",) if name == "qwen3-vl" else ())
    return model, rows / "rows.jsonl"


def write_composition(folder: Path, name: str, tokenizer: Path) -> None:
    """Qwen2-VL's tower, Whisper's encoder without silence and Qwen2."""
    *parts, vocab_size, kv_heads = COMPOSITIONS[name]
    config = shapes(*parts, vocab_size=vocab_size)
    config["text_config"]["num_key_value_heads"] = kv_heads
    write_drawn(config, tokenizer, folder, 112 if name == "tiny" else 388)


def write_qwen(folder: Path, tiny: bool) -> None:
    """The widths of Qwen3-VL-8B, 4 layers of the text model and 6 blocks of the tower, whose
    features go to three layers."""
    published = ROOT / "recipes" / "configs" / "qwen3_vl_8b"
    folder.mkdir(parents=True)
    write_processor("qwen3_vl", folder)
    made = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = json.loads((published / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["num_hidden_layers"] = 4
    config["vision_config"] |= {"depth": 6, "deepstack_visual_indexes": [1, 3, 5]}
    for part, keys in TINY_QWEN.items() if tiny else ():
        config[part] |= keys
    if tiny:
        config["text_config"]["rope_scaling"]["mrope_section"] = [3, 3, 2]
    config |= {key: value for key, value in made.items() if key.endswith("_token_id")}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "processor_config.json").unlink(missing_ok=True)  # the sizes of tests
    shutil.copy(published / "preprocessor_config.json", folder)


def write_rows(folder: Path, count: int, smaller: int, without: Sequence[str]) -> None:
    """Rows of the mix `natural` with noise in their media, sizes and texts so many times smaller.
    without: see sample_headers."""
    headers, rng, rows = sample_headers("natural", count, 0, without), np.random.default_rng(0), []
    first = np.concatenate([[0], np.cumsum(headers.media_per_example)])
    for i, characters in enumerate((headers.text // smaller).tolist()):
        asked = []
        for k in range(first[i], first[i + 1]):
            if headers.is_image[k]:
                kind, name, size = "image", f"{k}.jpg", np.maximum(headers.size[k] // smaller, 28)
                noise = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8))
                noise.resize(size.tolist(), Image.Resampling.BICUBIC).save(folder / name)
            else:
                kind, name, (samples, rate) = "audio", f"{k}.wav", headers.size[k].tolist()
                soundfile.write(folder / name, 0.1 * rng.standard_normal(samples // smaller), rate)
            asked.append({"type": kind, kind: name})
        answer = ("the red row " * (1 + characters // 12))[:max(characters, 1)]
        rows.append(json.dumps({"messages": [
            {"role": "user", "content": [*asked, {"type": "text", "text": "What is it?"}]},
            {"role": "assistant", "content": answer}]}))
    (folder / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")  # last: all is there


def _sampler(recipe: Recipe, dataset: ConversationDataset, batch: int) -> GlobalSampler:
    return make_sampler(dataset, range(len(dataset)), batch, data=recipe.data, per_rank=batch,
                        seed=recipe.run.seed)


def layouts_of(recipe: Recipe, dataset: ConversationDataset) -> list[BatchLayout]:
    """The steps of the run on one rank."""
    batch = recipe.train.batch_size
    sampler = _sampler(recipe, dataset, batch)
    return [BatchLayout.concat([dataset.layout(i) for i in sampler.batch(step).tolist()], [batch])
            for step in range(recipe.train.num_steps)]


def sized(recipe: Recipe, dataset: ConversationDataset, tokens: int) -> Recipe:
    """The recipe with the smallest train.batch_size of which every step of the run has `tokens` LLM
    tokens or more. Raises ValueError where the drawn examples are too few."""
    lengths = np.array([dataset.layout(i).tokens_per_example.sum() for i in range(len(dataset))])
    for batch in range(1, len(dataset) // recipe.train.num_steps + 1):
        sampler = _sampler(recipe, dataset, batch)
        if min(lengths[sampler.batch(s)].sum() for s in range(recipe.train.num_steps)) >= tokens:
            return replace(recipe, train=replace(recipe.train, batch_size=batch))
    raise ValueError(f"{len(dataset)} drawn examples are too few for {recipe.train.num_steps} "
                     f"steps of {tokens} tokens")


def one_rank() -> World:
    """The only rank of a run, with a port of its own."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return World(0, 1, 0, 1, "localhost", port)


def predicted(recipe: Recipe, layouts: Sequence[BatchLayout], device_name: str) -> dict:
    """What the dry run's models say of these steps on this GPU (of another device: on an H100)."""
    job, hardware = cluster(kind_of(device_name) or "h100-sxm", per_node=1).job(recipe, 1)
    choice = {p: recipe.fsdp.checkpointing(p) for p in PHASES}
    memory = MemoryModel.of(job)
    plans: list[StepPlan] = [plan_step(layout, plan_spec(job)) for layout in layouts]
    times = [timed(work_of(plan, recipe.model), memory, choice, hardware) for plan in plans]
    return {"predicted_step_s": float(np.mean([t.seconds for t in times])),
            "predicted_mfu": float(np.mean([t.mfu for t in times])),
            "predicted_for": hardware.name,
            "predicted_peak_bytes": float(max(memory.peak(loads_of(plan), choice)
                                              for plan in plans))}
