"""Answers of the model: what comes before the answer of an example, and the tokens that follow it.

Of our own parts every token is computed from its whole sequence, without a cache, through the
model's own forward pass: a model that is sharded gathers its weights there, on all ranks at the
same time. A model of transformers generates by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from orchmllm.batch import IGNORE_INDEX, Batch, Example, SequenceLengths, on_device
from orchmllm.models.mllm import MultimodalModel
from orchmllm.plan.assign import PlanSpec
from orchmllm.plan.layout import ENCODERS, TEXT, BatchLayout
from orchmllm.plan.step import plan_step


class Prompt(NamedTuple):
    """What comes before an answer. segments (s, 7): as in BatchLayout.from_table. token_ids (L,)
    int32 and media: as in Example."""

    segments: np.ndarray
    token_ids: Tensor
    media: dict[int, Tensor]


def prompt_of(example: Example, layout: BatchLayout) -> tuple[Prompt, list[int]]:
    """What comes before the first answer of an example, and the token ids of that answer. layout:
    of the example alone. Raises ValueError if nothing of it is learnt."""
    learnt = np.flatnonzero(example.labels.numpy() != IGNORE_INDEX)
    if not len(learnt):
        raise ValueError("it has no answer that is learnt")
    first = int(learnt[0])  # this position predicts the first token of the answer
    count = int((learnt == first + np.arange(len(learnt))).sum())
    start = np.cumsum(layout.num_tokens) - layout.num_tokens
    table = np.column_stack([layout.modality, layout.rows, layout.attn_len,
                             np.minimum(layout.num_tokens, first + 1 - start), layout.grid])
    return (Prompt(table[start <= first], example.token_ids[:first + 1], example.media),
            example.labels[first:first + count].tolist())


def batch_of(model: MultimodalModel, prompts: Sequence[Prompt], answers: Sequence[list[int]],
             spec: PlanSpec, device: torch.device) -> Batch:
    """The prompts, each with what was answered so far, as a batch without labels that stays on this
    rank. There may be none."""
    layout = BatchLayout.concat([
        BatchLayout.from_table(
            *np.array([[k], [0], [1 + len(prompt.segments)]]),
            np.concatenate([prompt.segments, [[TEXT, 0, 0, len(answer), 0, 0, 0]]]))
        for k, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))], [len(prompts)])
    plan = plan_step(layout, spec.as_sampled).for_rank(0)
    inputs, lengths = {}, {}
    for phase in ENCODERS:
        geometry = getattr(model, phase).config.geometry
        dtype = torch.uint8 if phase == "vision" else torch.float32
        rows = [prompts[k].media[segment] for k, segment in plan.media[phase].tolist()]
        inputs[phase] = on_device(torch.cat(
            [torch.zeros(0, geometry.row_size, dtype=dtype), *rows]), device)
        lengths[phase] = SequenceLengths.from_lengths(plan.encode[phase].lengths, device)
    ids = [torch.cat([prompt.token_ids.long(), torch.tensor(answer, dtype=torch.long)])
           for prompt, answer in zip(prompts, answers, strict=True)]
    return Batch(
        plan=plan, inputs=inputs, input_lengths=lengths,
        token_ids=on_device(torch.cat([torch.zeros(0, dtype=torch.long), *ids]), device),
        labels=None, text_lengths=SequenceLengths.from_lengths(plan.llm.lengths, device),
        position_ids=on_device(plan.position_ids, device),
        scatter={m: on_device(plan.scatter[m], device) for m in ENCODERS}, num_global_targets=0)


@torch.no_grad()
def greedy(model: MultimodalModel, prompts: Sequence[Prompt], spec: PlanSpec, device: torch.device,
           *, end_id: int | None, max_tokens: int, all_done: Callable[[bool], bool]
           ) -> list[list[int]]:
    """The most likely tokens after each prompt, at most max_tokens; end_id, where it comes, is the
    last of them. Every rank of a sharded model calls it, also without prompts. all_done: (whether
    this rank has all its answers) -> whether all ranks have theirs; it is called after every
    forward pass, so all ranks make as many of these."""
    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_tokens):
        unfinished = [k for k, answer in enumerate(answers) if answer[-1:] != [end_id]]
        logits = model(batch_of(model, [prompts[k] for k in unfinished],
                                [answers[k] for k in unfinished], spec, device))
        for k, token in zip(unfinished, logits.argmax(-1).tolist(), strict=True):
            answers[k].append(token)
        if all_done(all(answer[-1:] == [end_id] for answer in answers)):
            break
    return answers


def generated(hf: nn.Module, inputs: Mapping[str, Any], **options: Any) -> list[int]:
    """The token ids that a model of transformers writes after input_ids (1, n). inputs: what a
    processor makes of one example, by the argument of the model. options: of its generate."""
    ids = inputs["input_ids"]
    out = hf.generate(**{"attention_mask": torch.ones_like(ids), **inputs}, **options)
    return out[0, ids.shape[1]:].tolist()
