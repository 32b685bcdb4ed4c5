"""What the model answers to held-out examples while it trains: samples.jsonl of a run folder.

Every rank answers its share of the examples, and all ranks make as many forward passes: where the
model is sharded each of them is a collective. Answers are greedy, so nothing is drawn, and nothing
of the training depends on them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from orchmllm.batch import FailedSegment
from orchmllm.comm.exchange import RowGather, gather_texts
from orchmllm.config.recipe import Recipe
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.loading.step_loader import StepLoader
from orchmllm.data.loading.whole_examples import WholeFeed
from orchmllm.data.questions import Questions
from orchmllm.data.sampler import GlobalSampler
from orchmllm.models.whole_model import WholeModel
from orchmllm.plan.assign import PlanSpec
from orchmllm.runtime.build import build_orchestrator
from orchmllm.runtime.metrics import SAMPLES, JsonLines


class Samples:
    """rows: the held-out examples, of which the first train.num_samples are asked about. Its
    construction and `write` are collective. group: for features that move (default: the default
    group). log: is told every answer. stops: whether this rank is told to end, which cuts its
    answers off."""

    def __init__(self, recipe: Recipe, dataset: ConversationDataset, rows: Sequence[int],
                 spec: PlanSpec, device: torch.device, group: dist.ProcessGroup | None,
                 log: Callable[[str], None], stops: Callable[[], bool]) -> None:
        self._gather = RowGather(spec.ranks_per_node, recipe.launch.timeout_s)
        self._answers = Asked(
            recipe, dataset, list(rows[:recipe.train.num_samples]), spec, device, group,
            self._gather, stops)
        self._log, self._stops = log, stops
        self._path, self._file = recipe.run.folder / SAMPLES, None

    def write(self, model: nn.Module, step: int) -> bool:
        """Answers with the weights as they are. An example that cannot be read has its reason in
        place of an answer. False, and nothing is written, where a rank is told to end meanwhile."""
        told = [{"step": step, **line} for line in self._answers(model)]
        if self._gather(np.array([self._stops()], np.int64)).any():
            return False
        lines = [line for texts in gather_texts(self._gather, json.dumps(told))
                 for line in json.loads(texts)]
        if self._gather.rank == 0 and self._file is None:  # earlier ones may have been set aside
            self._file = JsonLines(self._path)
        for line in sorted(lines, key=lambda line: line["example"]):
            if self._file is not None:
                self._file.write(line)
            self._log(f"sample of step {step}, example {line['example']}:" + (
                f" it cannot be asked about: {line['error']}" if "error" in line else
                f"\n  the model says {_short(line['answer'])}"
                f"\n  the data say   {_short(line['expected'])}"))
        return True


def _short(text: str, most: int = 80) -> str:
    """For a line of the log; all of it is in samples.jsonl."""
    return repr(text) if len(repr(text)) <= most else f"{text!r:.{most - 4}} ..."


class Asked:
    """Asks a model about this rank's share of the examples `asked`, one after the other: a rank has
    one at a time, or none. Returns a line for each: example, and expected, answer and ended, or
    error. stops: cuts the answers of this rank off; other ranks write theirs."""

    def __init__(self, recipe: Recipe, dataset: ConversationDataset, asked: Sequence[int],
                 spec: PlanSpec, device: torch.device, group: dist.ProcessGroup | None,
                 gather: RowGather, stops: Callable[[], bool]) -> None:
        self._stops, self._asked, self._dataset, self._gather = stops, asked, dataset, gather
        self._max_tokens, self._tokenizer = recipe.train.sample_tokens, dataset.tokenizer
        self._end_id = dataset.tokenizer.end_id
        self._questions = Questions(dataset)
        spec = replace(spec.as_sampled, balance=replace(spec.as_sampled.balance, dispatch="load"))
        self._orchestrator = build_orchestrator(recipe, spec, gather.world_size, device, group)

    def __call__(self, model: WholeModel) -> list[dict]:
        sampler = GlobalSampler(self._asked, self._gather.world_size, shuffle=False)
        told: list[dict] = []
        for step in StepLoader(self._questions, sampler, self._orchestrator,
                               num_steps=len(sampler), feed=partial(WholeFeed, model=model)):
            [micro] = step.micro
            ids = model(self._orchestrator.dispatch(micro), {
                "max_new_tokens": self._max_tokens, "do_sample": False,
                "eos_token_id": self._end_id, "pad_token_id": self._end_id,
                "stopping_criteria": [lambda ids, *_, **__: ids.new_full(
                    ids.shape[:1], self._stops(), dtype=torch.bool)],
                "synced_gpus": self._gather.world_size > 1})
            failures = {failed.example: failed for failed in step.failed}
            for position, example in zip(micro.rank_plan.examples.tolist(),
                                         micro.rank_plan.example_ids.tolist(), strict=True):
                told.append({"example": example, **(
                    {"error": self._reason(example, failures[position])}
                    if position in failures else
                    {"expected": self._text(self._questions.answer(example)),
                     "answer": self._text(ids), "ended": ids[-1] == self._end_id})})
        return told

    def _reason(self, example: int, failed: FailedSegment) -> str:
        return f"{self._dataset.describe(example, failed.segment)['file']}: {failed.reason}"

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode([i for i in ids if i != self._end_id])
