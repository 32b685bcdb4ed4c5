"""What the model answers to held-out examples while it trains: samples.jsonl of a run folder.

Every rank answers its share of the examples, and all ranks make as many forward passes: where the
model is sharded each of them is a collective. Answers are greedy, so nothing is drawn, and nothing
of the training depends on them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from orchmllm.comm.exchange import RowGather, gather_texts
from orchmllm.config.recipe import Recipe
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.loading.step_loader import StepLoader
from orchmllm.data.loading.whole_examples import WholeFeed
from orchmllm.data.questions import Questions
from orchmllm.data.sampler import GlobalSampler
from orchmllm.models.generate import greedy, prompt_of
from orchmllm.models.hf import WholeModel
from orchmllm.models.mllm import MultimodalModel
from orchmllm.plan.assign import PlanSpec
from orchmllm.runtime.build import build_orchestrator
from orchmllm.runtime.metrics import SAMPLES, JsonLines


class Samples:
    """rows: the held-out examples, of which the first train.num_samples are asked about. Its
    construction and `write` are collective. group: for features that move (default: the default
    group). log: is told every answer."""

    def __init__(self, recipe: Recipe, dataset: ConversationDataset, rows: Sequence[int],
                 spec: PlanSpec, device: torch.device, group: dist.ProcessGroup | None,
                 log: Callable[[str], None]) -> None:
        self._dataset, self._spec, self._device, self._log = dataset, spec, device, log
        self._max_tokens, self._end_id = recipe.train.sample_tokens, dataset.tokenizer.end_id
        self._gather = RowGather(spec.ranks_per_node, recipe.launch.timeout_s)
        self._asked = list(rows[:recipe.train.num_samples])
        self._answers = self._of_parts
        if recipe.model.folder:
            self._answers, self._questions = self._of_whole, Questions(dataset)
            self._orchestrator = build_orchestrator(
                recipe, spec.as_sampled, self._gather.world_size, device, group)
        self._path, self._file = recipe.run.folder / SAMPLES, None

    def write(self, model: MultimodalModel | WholeModel, step: int) -> None:
        """Answers with the weights as they are. An example that cannot be read has its reason in
        place of an answer."""
        told = [{"step": step, **line} for line in self._answers(model)]
        lines = [line for texts in gather_texts(self._gather, json.dumps(told))
                 for line in json.loads(texts)]
        if self._gather.rank == 0 and self._file is None:  # earlier ones may have been set aside
            self._file = JsonLines(self._path)
        for line in sorted(lines, key=lambda line: line["example"]):
            if self._file is not None:
                self._file.write(line)
            self._log(f"sample of step {step}, example {line['example']}: " + (
                f"it cannot be asked about: {line['error']}" if "error" in line else
                f"{line['answer']!r:.200}; the data say {line['expected']!r:.200}"))

    def _of_parts(self, model: MultimodalModel) -> list[dict]:
        """Of this rank's examples, asked together."""
        told, prompts = [], []
        for example in self._asked[self._gather.rank::self._gather.world_size]:
            line = {"example": example}
            told.append(line)
            try:
                prompt, expected = prompt_of(self._dataset.load(example),
                                             self._dataset.layout(example))
                line["expected"] = self._text(expected)
                prompts.append(prompt)
            except Exception as error:  # of this rank alone: it still takes part in what follows
                line["error"] = f"{type(error).__name__}: {error}"
        answers = iter(greedy(
            model, prompts, self._spec, self._device, end_id=self._end_id,
            max_tokens=self._max_tokens,
            all_done=lambda done: bool(self._gather([int(done)]).all())))
        return [line if "error" in line else line | self._answered(next(answers)) for line in told]

    def _of_whole(self, model: WholeModel) -> list[dict]:
        """Of this rank's examples, one after the other: each rank has one at a time, or none."""
        sampler = GlobalSampler(self._asked, self._gather.world_size, shuffle=False)
        told: list[dict] = []
        for step in StepLoader(self._questions, sampler, self._orchestrator,
                               num_steps=len(sampler), feed=partial(WholeFeed, join=model.join)):
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

    def _answered(self, ids: list[int]) -> dict:
        return {"answer": self._text(ids), "ended": ids[-1] == self._end_id}

    def _text(self, ids: list[int]) -> str:
        return self._dataset.tokenizer.decode([i for i in ids if i != self._end_id])
