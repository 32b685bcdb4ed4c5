"""Answers of a model that was trained here: encoders and connectors of ours, and the LLM as the
class of transformers that has its weights, which generates with a cache."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from orchmllm.config.job import resolve
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import Recipe
from orchmllm.data.formats.conversation import chat
from orchmllm.data.media.medium import Medium
from orchmllm.data.media.root import MediaRoot
from orchmllm.data.reader import RowReader
from orchmllm.data.text.tokenizer import ChatTokenizer
from orchmllm.hf.folder import read_json
from orchmllm.hf.sources import find_sources
from orchmllm.hf.tensors import TORCH_DTYPES, read_sharded
from orchmllm.models.flops import plan_spec
from orchmllm.models.generate import Prompt, batch_of, prompt_of
from orchmllm.models.llm import hf_config
from orchmllm.models.mllm import MultimodalModel
from orchmllm.models.names import PARTS, named
from orchmllm.plan.layout import VISION
from orchmllm.sharding.pretrained import load_pretrained
from orchmllm.tools.export.checkpoints import checkpoint_in, is_other, model_of, tokenizer_of
from orchmllm.tools.export.export import NOTE
from orchmllm.tools.generate.sampling import asked, device, length_told, sampling
from orchmllm.tools.generate.whole import ADAPTERS


class Trained(NamedTuple):
    """config: shapes. dtype: of the weights, as torch calls it. fill: copies them into a model.
    tokenizer: that of the training."""

    config: ModelConfig
    dtype: str
    fill: Callable[[MultimodalModel], None]
    tokenizer: ChatTokenizer


def is_own(folder: Path) -> bool:
    """Whether a folder is a run, a checkpoint or an export of this project's own parts. Raises
    ValueError for one that is neither that nor a model of transformers, or adapters for one."""
    if (folder / "config.json").is_file() or (folder / ADAPTERS).is_file():
        return False
    if (folder / NOTE).is_file() or (folder / "state.json").is_file() or (
            folder / "checkpoints").is_dir():
        return True
    raise ValueError(f"{folder} is no run.dir with checkpoints, no checkpoint, no export and no "
                     "model of transformers (config.json): give one of these folders")


def open_trained(folder: Path, tokenizer: Path | None, log: Callable[[str], None]) -> Trained:
    """What an export, a checkpoint or a run's newest checkpoint holds. Raises ValueError."""
    if (folder / NOTE).is_file():
        config = model_of(read_json(folder / NOTE))
        config = replace(
            config, connectors=str(folder / "connectors.safetensors"),
            **{p: replace(getattr(config, p), pretrained=str(folder / p)) for p in PARTS})
        sources = find_sources(config)
        first = next(iter(sources[0].tensors.values()))
        return Trained(config, TORCH_DTYPES[first.dtype],
                       lambda model: load_pretrained(model, sources),
                       _tokenizer(folder, tokenizer or folder / "tokenizer"))
    checkpoint = checkpoint_in(folder)
    log(f"checkpoint {checkpoint}")
    state, saved = read_json(checkpoint / "state.json"), read_sharded(checkpoint)
    first = next(t for key, t in saved.items() if key.startswith("model."))
    if tokenizer is not None and is_other(tokenizer, state):
        log(f"warning: --tokenizer {tokenizer} differs from the one of the training: the same text "
            "may be other token ids")

    @torch.no_grad()
    def fill(model: MultimodalModel) -> None:
        for name, parameter in model.named_parameters():
            parameter.copy_(saved[f"model.{name}"].load())

    return Trained(model_of(state), TORCH_DTYPES[first.dtype], fill,
                   _tokenizer(checkpoint, tokenizer or tokenizer_of(state)))


def _tokenizer(folder: Path, path: Path) -> ChatTokenizer:
    try:
        return ChatTokenizer(path)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}; name the tokenizer with --tokenizer") from error


def read_prompt(question: str, media: list[Medium], trained: Trained) -> Prompt:
    """A question about media as training reads a row of data up to its answer. Raises ValueError
    for what cannot be read."""
    if "<image>" not in question and "<audio>" not in question:
        marks = ["<image>\n" if m.modality == VISION else "<audio>\n" for m in media]
        question = "".join(marks) + question
    turns = chat({
        "images": [m for m in media if m.modality == VISION],
        "audios": [m for m in media if m.modality != VISION],
        "messages": [{"role": "user", "content": question}]}, MediaRoot(""))
    geometries = trained.config.vision.geometry, trained.config.audio.geometry
    example, row = asked(RowReader(trained.tokenizer, *geometries), turns)
    return prompt_of(example, row.layout)[0]


@torch.no_grad()
def answer_own(args: argparse.Namespace, log: Callable[[str], None]) -> str:
    """The answer. args: of the command. log: is told what was read and how the answer ended. Raises
    ValueError."""
    from transformers import Qwen2ForCausalLM

    trained = open_trained(args.folder, args.tokenizer, log)
    config, end = trained.config, trained.tokenizer.end_id
    prompt = read_prompt(args.question, args.media, trained)
    with torch.device("meta"):
        model = MultimodalModel(config)
        llm = Qwen2ForCausalLM(hf_config(config.llm))
    model.to(getattr(torch, args.dtype or trained.dtype)).to_empty(device=device())
    trained.fill(model)
    weights = dict(model.named_parameters())
    llm.load_state_dict({n.hf: weights[n.name] for n in named("llm", config)}, assign=True)
    with torch.device(device()):  # its table is no weight
        llm.model.rotary_emb = type(llm.model.rotary_emb)(llm.config)
    spec = plan_spec(resolve(Recipe(model=config), 1, 1))
    x = model.embedded(batch_of(model, [prompt], [[]], spec, device())).unsqueeze(0)  # (1, L, D)
    [ids] = llm.eval().generate(
        inputs_embeds=x, attention_mask=torch.ones(x.shape[:2], dtype=torch.long, device=device()),
        use_cache=True, eos_token_id=end, pad_token_id=end, **sampling(args)).tolist()
    log(length_told(x.shape[1], len(ids), args, ended=ids[-1:] == [end]))
    return trained.tokenizer.decode([i for i in ids if i != end])
