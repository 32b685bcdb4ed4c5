"""What the model answers to held-out examples while it trains: samples.jsonl of a run folder.

Every rank answers its share of the examples, and all ranks make as many forward passes: where the
model is sharded each of them is a collective. Answers are greedy, so nothing is drawn, and nothing
of the training depends on them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import torch

from orchmllm.comm.exchange import RowGather, gather_texts
from orchmllm.config.recipe import Recipe
from orchmllm.data.dataset import ConversationDataset
from orchmllm.models.generate import greedy, prompt_of
from orchmllm.models.mllm import MultimodalModel
from orchmllm.plan.assign import PlanSpec
from orchmllm.runtime.metrics import SAMPLES, JsonLines


class Samples:
    """rows: the held-out examples, of which the first train.num_samples are asked about. Its
    construction and `write` are collective. log: is told every answer."""

    def __init__(self, recipe: Recipe, dataset: ConversationDataset, rows: Sequence[int],
                 spec: PlanSpec, device: torch.device, log: Callable[[str], None]) -> None:
        self._dataset, self._spec, self._device, self._log = dataset, spec, device, log
        self._max_tokens, self._end_id = recipe.train.sample_tokens, dataset.tokenizer.end_id
        self._gather = RowGather(spec.ranks_per_node, recipe.launch.timeout_s)
        asked = list(rows[:recipe.train.num_samples])
        self._mine = asked[self._gather.rank::self._gather.world_size]
        self._path, self._file = recipe.run.folder / SAMPLES, None

    def write(self, model: MultimodalModel, step: int) -> None:
        """Answers with the weights as they are. An example that cannot be read has its reason in
        place of an answer."""
        told, prompts = [], []
        for example in self._mine:
            line = {"step": step, "example": example}
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
        for line in told:
            if "error" not in line:
                ids = next(answers)
                line |= {"answer": self._text(ids), "ended": ids[-1] == self._end_id}
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

    def _text(self, ids: list[int]) -> str:
        return self._dataset.tokenizer.decode([i for i in ids if i != self._end_id])
