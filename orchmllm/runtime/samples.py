"""What the model answers to held-out examples while it trains: samples.jsonl of a run folder.

Every rank answers its share of the examples, and all ranks make as many forward passes: where the
model is sharded each of them is a collective. Answers are greedy, so nothing is drawn, and nothing
of the training depends on them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from orchmllm.comm.exchange import RowGather, gather_texts
from orchmllm.config.recipe import Recipe
from orchmllm.data.dataset import ConversationDataset
from orchmllm.models.generate import greedy, prompt_of
from orchmllm.models.mllm import MultimodalModel
from orchmllm.models.spec import spec_of
from orchmllm.plan.assign import PlanSpec
from orchmllm.runtime.metrics import SAMPLES, JsonLines


class Samples:
    """rows: the held-out examples, of which the first train.num_samples are asked about. Its
    construction and `write` are collective. group: for features that move (default: the default
    group). log: is told every answer."""

    def __init__(self, recipe: Recipe, dataset: ConversationDataset, rows: Sequence[int],
                 spec: PlanSpec, device: torch.device, group: dist.ProcessGroup | None,
                 log: Callable[[str], None]) -> None:
        self._gather = RowGather(spec.ranks_per_node, recipe.launch.timeout_s)
        self._answers = spec_of(recipe.model).asked(
            recipe, dataset, list(rows[:recipe.train.num_samples]), spec, device, group,
            self._gather)
        self._log, self._path, self._file = log, recipe.run.folder / SAMPLES, None

    def write(self, model: nn.Module, step: int) -> None:
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


class AskedParts:
    """Asks a model of our own parts about this rank's share of the examples `asked`, all of them
    together. Returns a line for each: example, and expected, answer and ended, or error."""

    def __init__(self, recipe: Recipe, dataset: ConversationDataset, asked: Sequence[int],
                 spec: PlanSpec, device: torch.device, group: dist.ProcessGroup | None,
                 gather: RowGather) -> None:
        self._dataset, self._asked, self._spec, self._device = dataset, asked, spec, device
        self._gather, self._max_tokens = gather, recipe.train.sample_tokens
        self._end_id = dataset.tokenizer.end_id

    def __call__(self, model: MultimodalModel) -> list[dict]:
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

    def _answered(self, ids: list[int]) -> dict:
        return {"answer": self._text(ids), "ended": ids[-1] == self._end_id}

    def _text(self, ids: list[int]) -> str:
        return self._dataset.tokenizer.decode([i for i in ids if i != self._end_id])
