"""Training on lengths that are drawn from the paper's mix, in this process, on one rank: no corpus
is needed. Used by steps.py and resume.py."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from orchmllm.config.job import resolve
from orchmllm.config.recipe import Recipe
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.sampler import GlobalSampler, make_sampler
from orchmllm.launch import World
from orchmllm.models.flops import padded_phases, plan_spec
from orchmllm.models.gpus import kind_of
from orchmllm.plan.assign import PHASES
from orchmllm.plan.geometry import text_lengths
from orchmllm.plan.layout import AUDIO, TEXT, VISION, BatchLayout
from orchmllm.plan.step import StepPlan, plan_step
from orchmllm.sharding.memory import MemoryModel, loads_of
from orchmllm.tools.doctor.synthetic import SyntheticDataset
from orchmllm.tools.predict.hardware import cluster
from orchmllm.tools.predict.step_time import timed, work_of
from orchmllm.tools.predict.workload import sample_headers

EXAMPLES = 4096


class DrawnDataset(SyntheticDataset):
    """Example i has lengths of the mix `natural`; its pixels, frames and tokens are random."""

    def __init__(self, recipe: Recipe, size: int = EXAMPLES) -> None:
        super().__init__(size=size, vision=recipe.model.vision.geometry,
                         audio=recipe.model.audio.geometry)
        self.headers = sample_headers("natural", size, recipe.run.seed)

    @cached_property
    def _first(self) -> np.ndarray:
        """(size + 1,): the number of each example's first medium."""
        return np.concatenate([[0], np.cumsum(self.headers.media_per_example)])

    def _segments(self, i: int):
        found = self.headers
        if found.prefix[i]:
            yield TEXT, text_lengths(int(found.prefix[i]))
        for k in range(self._first[i], self._first[i + 1]):
            image, size = found.is_image[k], found.size[k].tolist()
            yield (VISION if image else AUDIO), (
                self.vision if image else self.audio).segment_lengths(*size)
        yield TEXT, text_lengths(int(found.text[i]))


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
    """What the dry run's models say of these steps on this GPU (of another device: on an H100),
    peak memory on this device."""
    gpu = kind_of(device_name)
    job, hardware = cluster(gpu or "h100-sxm", per_node=1).job(recipe, 1)
    choice = {p: recipe.fsdp.checkpointing(p) for p in PHASES}
    memory = MemoryModel.of(job)
    plans: list[StepPlan] = [plan_step(layout, plan_spec(job)) for layout in layouts]
    pad = padded_phases(recipe.model)
    times = [timed(work_of(plan, recipe.model, pad), memory, choice, hardware) for plan in plans]
    here = MemoryModel.of(resolve(recipe, 1, 1), on_cpu=gpu is None)
    return {"predicted_step_s": float(np.mean([t.seconds for t in times])),
            "predicted_mfu": float(np.mean([t.mfu for t in times])),
            "predicted_for": hardware.name,
            "predicted_peak_bytes": float(max(here.peak(loads_of(plan, pad), choice)
                                              for plan in plans))}
