"""Answers of a model of transformers, from a folder of save_pretrained with its processor, or from
peft's adapters for one."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from orchmllm.data.formats.conversation import Turn
from orchmllm.data.media.medium import MediaError
from orchmllm.data.processed import ProcessedReader
from orchmllm.data.questions import before_answer
from orchmllm.data.text.model_folder import processor_class
from orchmllm.data.text.processor import Processor
from orchmllm.data.text.tokenizer import ChatTokenizer
from orchmllm.hf.folder import read_json
from orchmllm.hf.tensors import DTYPES, read_sharded
from orchmllm.models.adapters import need_peft
from orchmllm.models.families import model_class, read_config
from orchmllm.models.generate import generated
from orchmllm.tools.export.checkpoints import check_files, model_of, other_tokenizer
from orchmllm.tools.export.whole import end_as_trained, trained_model
from orchmllm.tools.generate.pictures import check, write_pictures

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTERS = "adapter_config.json"  # peft's
LOCAL = {"local_files_only": True, "trust_remote_code": False}


def answer_whole(args: argparse.Namespace, log: Callable[[str], None]) -> str:
    """The answer. args: of the command. log: is told how it ended. Raises ValueError or OSError."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    adapters, folder = args.folder / ADAPTERS, args.folder
    if adapters.is_file():
        folder = read_json(adapters)["base_model_name_or_path"]
        if not Path(folder).is_dir():
            raise ValueError(f"{adapters}: base_model_name_or_path is {folder}, which is no folder "
                             "here: put the model there, or name its folder in that file")
    config = AutoConfig.from_pretrained(folder, **LOCAL)
    if processor_class(config):
        config = read_config(Path(folder))
        kind, (tokenizer, given) = model_class(config), _read(args, folder)
    elif args.media:
        raise ValueError(f"{args.folder} is a {config.model_type}: only text is given to it; leave "
                         "the media out, or give the folder of a run")
    else:
        kind = AutoModelForCausalLM
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, **LOCAL)
        except (ImportError, ValueError) as error:
            raise ValueError(f"{args.folder}: {' '.join(str(error).split())}") from error
        if not tokenizer.chat_template:
            raise ValueError(f"{args.folder}: its tokenizer has no chat template: add the "
                             "chat_template.jinja of the model")
        given = tokenizer.apply_chat_template(
            [{"role": "user", "content": args.question}], add_generation_prompt=True,
            tokenize=True, return_dict=True, return_tensors="pt")
    model = kind.from_pretrained(
        folder, config=config, dtype=getattr(torch, args.dtype) if args.dtype else "auto", **LOCAL)
    if adapters.is_file():
        need_peft()
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, args.folder)
        end_as_trained(model.generation_config, Path(folder))
    return _answer(model, Path(folder), tokenizer, given, args, log)


def answer_run(args: argparse.Namespace, checkpoint: Path, log: Callable[[str], None]) -> str:
    """The answer of a checkpoint of a run. The rest as in answer_whole. Raises ValueError for
    adapters, or files that are not what was saved."""
    log(f"checkpoint {checkpoint}")
    check_files(checkpoint, "name an earlier one")
    state = read_json(checkpoint / "state.json")
    trained = model_of(state)
    if trained.lora.rank:
        raise ValueError(f"{checkpoint} has adapters: write them to a folder with orchmllm export, "
                         "and give the folder")
    if warning := other_tokenizer(Path(trained.folder), state):
        log(warning)
    found = trained_model(Path(trained.folder), read_sharded(checkpoint),
                          DTYPES.get(args.dtype, ""))
    model = type(found).from_pretrained(  # with what is computed and in no file
        None, config=found.config, state_dict=found.state_dict(), dtype=found.dtype)
    model.generation_config = found.generation_config
    end_as_trained(model.generation_config, Path(trained.folder))
    return _answer(model, Path(trained.folder), *_read(args, trained.folder), args, log)


def _read(args: argparse.Namespace, folder: str | Path) -> tuple[ChatTokenizer, dict[str, Tensor]]:
    """(The tokenizer; the question as training reads a row of data up to its answer). Raises
    ValueError for what cannot be read."""
    reader = ProcessedReader(Processor(folder))
    turns = Turn("user", (*args.media, args.question), False), Turn("assistant", ("a",), True)
    [row] = reader.plan(lambda _: turns, [0])
    try:
        if row.problem is not None:
            raise row.problem
        example = before_answer(reader.load(row, lambda: "the question"), row)
    except MediaError as error:
        raise ValueError(str(error)) from error
    return reader.tokenizer, {"input_ids": example.input_ids[None], **example.media}


def sampling(args: argparse.Namespace) -> dict:
    """Arguments of transformers' generate, and the seed is set. args: of the command."""
    torch.manual_seed(args.seed)
    drawn = {"temperature": args.temperature, "top_p": args.top_p, "top_k": 0}
    return {"max_new_tokens": args.max_tokens, "do_sample": args.temperature > 0,
            **(drawn if args.temperature else {})}


@torch.no_grad()
def _answer(model: PreTrainedModel, folder: Path, tokenizer: ChatTokenizer,
            given: Mapping[str, Tensor], args: argparse.Namespace, log: Callable[[str], None]
            ) -> str:
    """What a model answers to what it is given. folder: of its processor. Raises ValueError where
    --out is given and it makes no images."""
    check(args, model)
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(where).eval()
    given = {name: value.to(where, model.dtype if value.is_floating_point() else None)
             for name, value in given.items()}
    ends = model.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else ends or [None]
    ids = generated(model, given, pad_token_id=ends[0], **sampling(args))  # pads nothing
    write_pictures(model, folder, given, ids, args, log)
    cut = "" if ids and ids[-1] in ends else f": cut off at --max-tokens {args.max_tokens}"
    log(f"{given['input_ids'].shape[1]} tokens before the answer, {len(ids)} in it{cut}")
    return tokenizer.decode(ids, skip_special_tokens=True)
