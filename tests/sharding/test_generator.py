"""Images that a model makes, from files to gradients on real ranks: every parameter's gradient is
that of a plain loop over examples, in which diffusers' own attention makes one image at a time."""

from __future__ import annotations

import json
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from orchmllm.batch import IGNORE_INDEX
from orchmllm.composition.generator import draw, rotated
from orchmllm.config.balance import PhaseConfig
from orchmllm.config.model import ModelConfig, PartConfig
from orchmllm.data.made import SQUARES
from orchmllm.data.stream import open_dataset
from orchmllm.models import made
from orchmllm.models.made import key_of
from orchmllm.plan.layout import MADE
from orchmllm.trainer import Trainer
from tests.lib import composed
from tests.lib import whole_models as models
from tests.lib.ranks import RankFailure, run_ranks
from tests.lib.training import train
from tests.lib.whole_folders import write_medium
from tests.sharding.test_composed import loaded
from tests.sharding.test_planned_phases import gradients, recipe, steps_of

pytestmark = [pytest.mark.dist, pytest.mark.whole]
NAME, SEED, WEIGHT = "qwen2_vl_whisper_llama", 3, 0.5
# (Media that are read, images that are made) of each example. Of the steps of 8 examples the second
# has media of one example alone, on another rank than its text, so that ranks that encode and make
# nothing send; the third has none.
COUNTS = [(1, 2), (0, 1), (2, 0), (0, 3), (1, 0), (0, 0), (2, 1), (0, 1),
          *[(0, 0)] * 7, (2, 1), *[(1, 0)] * 8, (1, 1), (0, 2)]


def write_folder(folder: Path, **makes) -> None:
    """A model with a generator, and rows for it."""
    composed.write_composed(NAME, folder / "model", generator=folder / "generator", side=4,
                            max_pixels=24 * 24, **makes)
    config = json.loads((folder / "model" / "config.json").read_text())
    config["generator_config"]["condition_dropout"] = 0.4
    (folder / "model" / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    with open(folder / "model" / "data.jsonl", "w", encoding="utf-8") as file:
        for i, (reads, makes_here) in enumerate(COUNTS):
            asked = [part for k in range(reads) for part in (
                write_medium(("image", "audio")[k % 2], folder / "model", f"{i}_{k}", rng),
                {"type": "text", "text": f" no {k}"})]
            answer = [{"type": "text", "text": f"here {i}"}]
            for k in range(makes_here):
                size = (*rng.integers(5, 40, 2).tolist(), 3)
                Image.fromarray(rng.integers(0, 256, size, np.uint8)).save(
                    folder / "model" / f"made_{i}_{k}.png")
                answer += [{"type": "image", "image": f"made_{i}_{k}.png"},
                           {"type": "text", "text": " and"}]
            file.write(json.dumps({"messages": [
                {"role": "user", "content": [*asked, {"type": "text", "text": "make it"}]},
                {"role": "assistant", "content": answer}]}) + "\n")


def stock_loss(model, example, keys: dict[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(Sum of the text's loss, that of the images) of one example by the model's own code. keys: by
    segment."""
    layout, part = example.lengths, model.generator
    ids = example.input_ids[None]
    out = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False,
                states_of=torch.arange(ids.shape[1]),
                **{k: v.double() if v.is_floating_point() else v for k, v in example.media.items()})
    labels = F.pad(example.labels[1:], (0, 1), value=IGNORE_INDEX)
    text = F.cross_entropy(out.logits[0], labels, ignore_index=IGNORE_INDEX, reduction="sum")
    ends, total = np.cumsum(layout.num_tokens), torch.zeros((), dtype=torch.float64)
    for s, key in keys.items():
        assert example.input_ids[ends[s] - 1] == model.config.generator_config["token_id"]
        grid = layout.grid[s]
        latents = part.codec.encoded(example.parts[s][SQUARES], grid[None], torch.float64)
        time, noise, kept = draw(key, len(latents), latents, part.dropout)
        states = out.hidden_states[0, :ends[s]] * kept
        h, w = grid[1:].tolist()
        sides = [(torch.arange(n, dtype=torch.float64) + 0.5) / n * torch.pi for n in (h, w)]
        angles = torch.stack(torch.meshgrid(*sides, indexing="ij")).reshape(2, -1, 1) * (
            torch.tensor([1, 2, 4, 8]))
        part.waves = torch.cat([*angles.sin(), *angles.cos()], 1)
        flow = part.transformer(
            hidden_states=(latents + time * (noise - latents))[None],
            encoder_hidden_states=part.connector(part.norm(states))[None],
            timestep=1000 * time[None], encoder_attention_mask=None, num_frames=1,
            height=h, width=w,
            rope_interpolation_scale=(1, part.codec.side, part.codec.side)).sample[0]
        total = total + (flow - (noise - latents)).square().mean(1).sum()
    return text, total


def reference(model, rows, step) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(Both losses, the gradients of the weighted sum of their means), one example after another.
    diffusers rotates in float32, whose rounding would be seen."""
    from diffusers.models.transformers import transformer_ltx

    model.generator.transformer.set_attn_processor(transformer_ltx.LTXVideoAttnProcessor())
    transformer_ltx.apply_rotary_emb = lambda x, freqs: rotated(x, *freqs)
    model.zero_grad()
    totals = [0.0, 0.0]
    for i in step.example_ids.tolist():
        segments = np.flatnonzero(rows.layout(i).modality == MADE).tolist()
        text, images = stock_loss(model, rows.load(i), {
            s: key_of(SEED, step.index, i, s) for s in segments})
        (text / max(step.num_global_targets, 1)
         + WEIGHT * images / max(step.num_made_rows, 1)).backward()
        totals = [totals[0] + float(text.detach()), totals[1] + float(images.detach())]
    return totals, models.gradients(model)


def compared(world, folder: Path, runs: list) -> list[dict]:
    """What the plans of the first of the runs make, step by step; every run is compared with the
    plain loop, on the first rank."""
    stock = models.stock_of(folder)
    stock.generator.load_codec(folder, torch.device("cpu"), torch.float64)
    rows = open_dataset(runs[0].data, runs[0].model.folder, seed=0)
    wanted, seen = {}, []
    for number, run in enumerate(runs):
        trainer = Trainer(replace(run, run=replace(run.run, dir=f"{run.run.dir}{number}")), world)
        learn = {n for n, p in trainer.model.hf.named_parameters() if p.requires_grad}
        try:
            for step in steps_of(trainer):
                total = trainer._accumulate(step)
                torch.distributed.all_reduce(total)
                found, layout = gradients(trainer), step.layout
                assert step.num_made_rows == layout.rows[layout.segments[MADE]].sum()
                if number == 0:
                    plan = step.micro[0].plan
                    seen.append({"made": plan.encode["generator"].target_sizes.tolist(),
                                 "moved": plan.stats["generator"]["moved_bytes"]})
                if world.rank:
                    continue
                if step.index not in wanted:
                    wanted[step.index] = reference(stock, rows, step)
                losses, want = wanted[step.index]
                assert total.tolist() == pytest.approx(losses, rel=1e-9)
                size = max(float(g.abs().max()) for g in want.values())
                errors = {n: float((found[n] - want[n]).abs().max()) / size for n in learn}
                assert max(errors.values()) <= 1e-9, max(errors.items(), key=itemgetter(1))
        finally:
            trainer.close()
    return seen


def settings(folder: Path, dispatch: str = "tensors", **sections) -> list:
    run = recipe(folder, generator_loss_weight=WEIGHT)
    run = replace(run, run=replace(run.run, seed=SEED), balance=replace(
        run.balance, dispatch=dispatch, generator=PhaseConfig(policy="greedy"),
        vision=PhaseConfig(policy="greedy")))
    return [replace(run, **{section: replace(getattr(run, section), **keys)
                            for section, keys in sections.items()})]


def check(ranks: int, folder: Path, runs: list, of_rank=compared) -> None:
    first, second, third, _ = run_ranks(of_rank, ranks, folder, runs)[0]
    assert sum(first["made"]) == 8 and not any(third["made"])
    if ranks > 1:
        assert first["moved"] and 0 in second["made"]
        assert bool(second["moved"]) == (ranks != 3)  # there it is made where its text is


def test_conditions_are_dropped_as_often_as_was_asked_for():
    def kept(dropout: float) -> int:
        return sum(bool(draw(key, 1, torch.zeros(1, 3), dropout)[2]) for key in range(200))

    assert kept(0.0) == 200 and 160 < kept(0.1) < 195



def test_gradients_are_those_of_a_loop_over_examples(tmp_path):
    """Where a layer of the generator is recomputed, and the text's loss is made by chunks. A medium
    that cannot be read teaches nothing."""
    write_folder(tmp_path)
    check(2, tmp_path / "model", settings(tmp_path / "model", fsdp={
        "generator_checkpointing": "full:1", "loss_chunk_rows": 16}), compared_and_without_one)


def compared_and_without_one(world, folder: Path, runs: list) -> list[dict]:
    seen = compared(world, folder, runs)
    if world.rank == 0:
        broken = folder / "made_3_1.png"
        broken.write_bytes(broken.read_bytes()[:60])
    torch.distributed.barrier()
    without_one(world, runs[0])
    return seen


def without_one(world, run) -> None:
    """Neither the text of the example whose medium is broken is learnt nor its other images; the
    rest is as before."""
    trainer = Trainer(run, world)
    try:
        step = next(iter(steps_of(trainer)))
        layout = step.layout
        made_by_others = layout.segments[MADE][layout.example_of_segment[
            layout.segments[MADE]] != 3]
        assert [f.example for f in step.failed] == [3]
        assert step.num_made_rows == layout.rows[made_by_others].sum()
        for micro in step.micro:
            items = trainer.orchestrator.dispatch(micro).made
            lost = items.examples == 3
            assert items.weights.tolist() == (~lost).astype(float).tolist() or items.is_placeholder
    finally:
        trainer.close()


@pytest.mark.slow
@pytest.mark.parametrize("ranks, shard_size, vae", [
    (1, 0, False), (2, 0, True), (3, 0, False), (4, 0, False), (4, 2, True)])
def test_every_dispatch_and_what_is_recomputed(ranks, shard_size, vae, tmp_path):
    """And not balanced, in two microbatches. vae: latents are made instead of pixels."""
    write_folder(tmp_path, **{"vae": tmp_path / "vae"} if vae else {})
    folder, shards = tmp_path / "model", {"shard_size": shard_size}
    check(ranks, folder, [
        *settings(folder, "load", fsdp={**shards, "activation_checkpointing": "full"}),
        *settings(folder, "bytes", fsdp={**shards, "generator_checkpointing": "selective:2"}),
        *settings(folder, fsdp={**shards, "generator_reshard": "none"}),
        *settings(folder, fsdp=shards, balance={"enabled": False},
                  train={"accumulation_steps": 2})])


@pytest.mark.slow
@pytest.mark.parametrize("parts", [
    ("llm", "vision", "audio"), ("generator",), ("generator", "llm"), ("vision", "audio")])
def test_what_is_frozen_changes_no_other_gradient(parts, tmp_path):
    """A frozen generator gives its condition a gradient; a frozen LLM gives none to no one."""
    write_folder(tmp_path)
    run_ranks(compared, 3, tmp_path / "model", settings(tmp_path / "model", model={
        **dict.fromkeys(parts, PartConfig(frozen=True)), "connectors_frozen": "llm" in parts
        and "generator" not in parts}, train={"accumulation_steps": 2}))


def drawn_by_rank(world, folder: Path, runs: list) -> None:
    """Noise that depends on the rank."""
    with mock.patch.object(made, "key_of", lambda *place: key_of(*place, world.rank)):
        compared(world, folder, runs)


@pytest.mark.slow
def test_noise_of_a_rank_is_seen(tmp_path):
    """By as much as the loss."""
    write_folder(tmp_path)
    with pytest.raises(RankFailure, match="assert") as error:
        run_ranks(drawn_by_rank, 2, tmp_path / "model", settings(tmp_path / "model"))
    assert "approx" in str(error.value)


@pytest.mark.slow
def test_a_run_goes_on_on_other_ranks_with_the_same_noise(tmp_path):
    write_folder(tmp_path)
    [run] = settings(tmp_path / "model")
    run = replace(run, data=replace(run.data, num_validation=2), train=replace(
        run.train, num_steps=4, warmup_steps=0, min_lr_ratio=1.0))
    alone = run_ranks(trained, 1, replace(run, run=replace(run.run, dir=f"{tmp_path}/alone")))[0]
    start = replace(run, train=replace(run.train, num_steps=2))
    found = [row for ranks, part in ((2, start), (3, run))
             for row in run_ranks(trained, ranks, part)[0]]
    between = [*alone[:3], *found[3:4], *alone[3:]]  # the first part ends with a validation
    assert len(alone) == 6 and len(found) == 7
    for got, want in zip(found, between, strict=True):
        assert got == pytest.approx(want, rel=1e-9, nan_ok=True)
    assert all(len(row) == 2 for row in found)


def trained(world, run) -> list[list[float]]:
    """Both losses of its steps and validations, in their order."""
    return [[row[name] for name in row if name.endswith("loss")] for row in train(world, run)]


@pytest.mark.slow
def test_a_generator_is_drawn_as_diffusers_draws_it_on_any_number_of_ranks(tmp_path):
    write_folder(tmp_path)
    model = ModelConfig(config=str(tmp_path / "model"))
    one, three = (run_ranks(loaded, ranks, model)[0] for ranks in (1, 3))
    assert all(np.array_equal(one[name], three[name]) for name in one)
    blocks = "generator.transformer.transformer_blocks.0."
    assert one[f"{blocks}attn1.to_q.weight"].std() == pytest.approx((3 * 24)**-0.5, rel=0.1)
    assert one[f"{blocks}scale_shift_table"].std() == pytest.approx(24**-0.5, rel=0.2)
