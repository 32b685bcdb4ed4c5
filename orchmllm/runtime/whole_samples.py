"""Asks a model of transformers about held-out examples, see orchmllm.runtime.samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from orchmllm.comm.exchange import RowGather
from orchmllm.config.recipe import Recipe
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.loading.step_loader import StepLoader
from orchmllm.data.loading.whole_examples import WholeFeed
from orchmllm.data.questions import Questions
from orchmllm.data.sampler import GlobalSampler
from orchmllm.models.hf import WholeModel
from orchmllm.plan.assign import PlanSpec
from orchmllm.runtime.build import build_orchestrator
from orchmllm.runtime.samples import AskedParts


class AskedWhole(AskedParts):
    """One example after the other: a rank has one at a time, or none. Returns the lines of
    AskedParts."""

    def __init__(self, recipe: Recipe, dataset: ConversationDataset, asked: Sequence[int],
                 spec: PlanSpec, device: torch.device, group: dist.ProcessGroup | None,
                 gather: RowGather) -> None:
        super().__init__(recipe, dataset, asked, spec, device, group, gather)
        self._questions = Questions(dataset)
        spec = replace(spec.as_sampled, balance=replace(spec.as_sampled.balance, dispatch="load"))
        self._orchestrator = build_orchestrator(recipe, spec, gather.world_size, device, group)

    def __call__(self, model: WholeModel) -> list[dict]:
        sampler = GlobalSampler(self._asked, self._gather.world_size, shuffle=False)
        told: list[dict] = []
        for step in StepLoader(self._questions, sampler, self._orchestrator,
                               num_steps=len(sampler), feed=partial(WholeFeed, model=model)):
            [micro] = step.micro
            ids = model(self._orchestrator.dispatch(micro, 0), {
                "max_new_tokens": self._max_tokens, "do_sample": False,
                "eos_token_id": self._end_id, "pad_token_id": self._end_id,
                "synced_gpus": self._gather.world_size > 1})
            errors = {failed.example: failed.reason for failed in step.failed}
            for position, example in zip(micro.rank_plan.examples.tolist(),
                                         micro.rank_plan.example_ids.tolist(), strict=True):
                told.append({"example": example, **(
                    {"error": errors[position]} if position in errors else
                    {"expected": self._text(self._questions.answer(example)),
                     **self._answered(ids)})})
        return told
