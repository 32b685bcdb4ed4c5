"""A model with the structure of a configuration and small sizes, in float64, with seeded weights.

Layers: as many of the first ones as have one of each kind, by the modules that the real model has.
Widths: all are divided by one number, so that those that are equal, or multiples of each other,
stay that; heads by what divides them, with sizes of heads as they are. Experts: a few. Tokens keep
their numbers: the table and the head have the rows of those that the examples have. What processors
decide (patches, images, windows, bands of sound) stays. If such a model cannot be built or run,
larger ones are tried, at last the real one.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from itertools import product

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from orchmllm.batch import IGNORE_INDEX, ProcessedExample
from orchmllm.models.families import model_class
from orchmllm.proof.compare import InFloat64, in_float64, logits_of

WIDTH = 256  # of the text model, about
MOST_PARAMETERS = 150_000_000  # which are 1.2 GB, and five times that with gradients and copies
EXPERTS, CHOSEN = 4, 2
# What an integer of a configuration means, only its name tells.
_LAYERS = re.compile("layer|depth|block")
_INDICES = re.compile("layer|index|indices|idx|block")
_HEADS = re.compile("heads")
_EXPERTS = re.compile("expert")
_CHOSEN = re.compile("per_tok|top_?k")
_GROUPS = re.compile("n_group|topk_group")
_KEPT = re.compile("head_dim|token|vocab|position|image|patch|window|mel|merge|length|_id$|kernel")


def small(config: PreTrainedConfig, examples: Sequence[ProcessedExample]
          ) -> tuple[nn.Module, list[ProcessedExample]]:
    """(The model, the examples with labels as its head has them). Raises ValueError if none can be
    built and run by transformers itself."""
    with torch.device("meta"):
        real = model_class(config)._from_config(copy.deepcopy(config))
    ids = torch.cat([torch.zeros(1).long(), *(e.input_ids for e in examples)]).unique()
    width, widths = config.get_text_config(decoder=True).hidden_size, _widths(real)
    powers = range(max(0, int(math.log2(width / WIDTH))), -1, -1)
    tried: dict[str, str] = {}
    for tokens, layers, power in product((ids, None), (real, None), powers):
        smaller = copy.deepcopy(config)
        if layers is not None:
            _shorten(smaller, layers)
        _narrow(smaller, widths, 2**power)
        if tokens is not None:
            _with_few_tokens(smaller, tokens)
        if (said := smaller.to_json_string()) in tried:
            continue
        try:
            return _built(smaller, tokens, examples)
        except Exception as error:  # whatever its own code raises
            tried[said] = f"{type(error).__name__}: {error}"
    raise ValueError(f"no small model like it can be built: {next(iter(tried.values()))}")


def _built(config: PreTrainedConfig, ids: Tensor | None, examples: Sequence[ProcessedExample]
           ) -> tuple[nn.Module, list[ProcessedExample]]:
    """Raises whatever transformers raises."""
    config._experts_implementation = "eager"  # the product of all experts has no float64
    kind = model_class(config)
    with torch.device("meta"):
        size = sum(p.numel() for p in kind._from_config(copy.deepcopy(config)).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"it would have {size:,} parameters")
    with torch.random.fork_rng([]), InFloat64():
        torch.manual_seed(0)
        model = kind._from_config(config, dtype=torch.float64).double().train()
        if ids is not None:
            examples = _with_numbers(model, ids, examples)
        with torch.no_grad():  # zeros would hide what is behind them
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.02)
            for example in examples:
                logits_of(model, in_float64(example))
    return model, list(examples)


def _shorten(config: PreTrainedConfig, real: nn.Module) -> None:
    """Leaves the first layers of each stack, in place. real: has all."""
    for path, stack in _stacks(real):
        part, n = reduce(getattr, path, config), len(stack)
        named = {name: value for name, value in vars(part).items() if _LAYERS.search(name)}
        kinds = list(map(_kind, stack))
        needed = max(kinds.index(kind) for kind in kinds) + 1
        for name, value in vars(part).items():
            if not isinstance(value, list | tuple) or not value:
                continue
            if len(value) == n:
                needed = max(needed, *(value.index(one) + 1 for one in value))
            elif _INDICES.search(name) and all(isinstance(v, int) and 0 <= v < n for v in value):
                needed = max(needed, min(value) + 1)
        for name, value in named.items():
            if value == n and not isinstance(value, bool):
                setattr(part, name, max(2, needed))
        for name, value in vars(part).items():
            if isinstance(value, list | tuple) and len(value) == n:
                setattr(part, name, value[: max(2, needed)])


def _stacks(real: nn.Module) -> Iterator[tuple[tuple[str, ...], nn.ModuleList]]:
    """(Where its configuration is, blocks) of each stack of blocks with more than two."""
    paths = {id(part): path for path, part in _parts(real.config)}
    for name, module in real.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 2:
            owners = [real.get_submodule(".".join(name.split(".")[:k]))
                      for k in range(name.count("."), -1, -1)]
            config = next(c for m in owners if (c := getattr(m, "config", None)) is not None)
            if id(config) in paths:
                yield paths[id(config)], module


def _kind(block: nn.Module) -> tuple:
    """What tells kinds of blocks apart: classes, shapes of weights and settings of modules."""
    settings = [(type(m).__name__, sorted(
        (n, str(v)) for n, v in vars(m).items() if isinstance(v, bool | int | float | str)
        and "idx" not in n and not n.startswith("_"))) for m in block.modules()]
    return settings, [tuple(p.shape) for p in block.parameters()]


def _parts(config: PreTrainedConfig, path: tuple[str, ...] = ()
           ) -> Iterator[tuple[tuple[str, ...], PreTrainedConfig]]:
    """A configuration and those in it, with the names that lead there."""
    yield path, config
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value, (*path, name))


def _widths(real: nn.Module) -> set[int]:
    """Of what its layers take and make."""
    found: set[int] = set()
    for module in real.modules():
        found.update(getattr(module, name) for name in (
            "in_features", "out_features", "out_channels", "embedding_dim")
            if isinstance(getattr(module, name, None), int))
        found.update(n for p in module.parameters(recurse=False) for n in p.shape)
    return found


def _narrow(config: PreTrainedConfig, widths: set[int], by: int) -> None:
    """Divides widths and heads, in place."""
    for _, part in _parts(config):
        for name, value in list(vars(part).items()):
            if not isinstance(value, int) or isinstance(value, bool) or name.startswith("_"):
                continue
            if _HEADS.search(name) and "head_dim" not in name:
                setattr(part, name, value // math.gcd(value, by))
            elif _GROUPS.search(name):
                setattr(part, name, 1)
            elif _EXPERTS.search(name) and value in widths or _CHOSEN.search(name) or (
                    _EXPERTS.search(name) and value <= 512):
                setattr(part, name, min(value, CHOSEN if _CHOSEN.search(name) else EXPERTS))
            elif value in widths and value % by == 0 and not _KEPT.search(name):
                setattr(part, name, value // by)


def _with_few_tokens(config: PreTrainedConfig, ids: Tensor) -> None:
    """Leaves as many tokens as there are different `ids` (n,), in place."""
    size = config.get_text_config(decoder=True).vocab_size
    for _, part in _parts(config):
        if getattr(part, "vocab_size", None) == size:
            part.vocab_size = len(ids)
            if getattr(part, "pad_token_id", None) is not None:
                part.pad_token_id = 0


def _with_numbers(model: nn.Module, ids: Tensor, examples: Sequence[ProcessedExample]
                  ) -> list[ProcessedExample]:
    """The examples with labels that are numbers of tokens among ids (n,), which the model's table
    then has in place of all, in place."""
    table = model.get_input_embeddings()
    table.numbers = torch.zeros(int(ids.max()) + 1, dtype=torch.int64)
    table.numbers[ids] = torch.arange(len(ids))
    table.register_forward_pre_hook(_numbered)
    return [replace(e, labels=e.labels.where(
        e.labels == IGNORE_INDEX, table.numbers[e.input_ids])) for e in examples]


def _numbered(table: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Of a token that is not among them the model wants nothing."""
    ids, *more = arguments
    return table.numbers[ids.clamp(max=len(table.numbers) - 1)], *more
