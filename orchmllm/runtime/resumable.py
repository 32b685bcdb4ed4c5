"""Whether a run may go on from a checkpoint, and with which recipe."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import Recipe
from orchmllm.plan.assign import PHASES
from orchmllm.runtime.run_state import VERSION


def check_resumable(state: dict, recipe: Recipe, data: dict) -> None:
    """Raises ValueError naming what differs between a checkpoint and the recipe."""
    if state.get("version") != VERSION:
        raise ValueError(f"the checkpoint's state has version {state.get('version')}, this code "
                         f"reads {VERSION}")
    _check_model(state["model"], recipe.model)
    if state["seed"] != recipe.run.seed:
        raise ValueError(f"run.seed is {recipe.run.seed}, the checkpoint was sampled with "
                         f"{state['seed']}: the data would repeat; use that seed")
    was = state.get("param_dtype", recipe.fsdp.param_dtype)  # not recorded at first
    if was != recipe.fsdp.param_dtype:
        raise ValueError(
            f"fsdp.param_dtype is {recipe.fsdp.param_dtype}, the checkpoint's parameters and "
            f"moments are {was}: use {was}, or export the checkpoint and start a new run from it")
    _check_batch(state, recipe)
    held_out = recipe.data.num_validation
    order = {"num_validation": state.get("num_validation", held_out), **state.get("order", {})}
    for name, now in {"num_validation": held_out, **_order_keys(recipe)}.items():
        was = order[name] if name in order else _order_keys(Recipe())[name]
        if was != now and not recipe.run.allow_data_change:
            raise ValueError(
                f"data.{name} is {now}, the checkpoint was trained with {was}: the order of all "
                "examples would change; use that, or set run.allow_data_change=true to go on at "
                "the same step of the new order")
    if not recipe.run.allow_data_change:
        _check_data(dict(state["data"]), dict(data))


def describe_end(saved: Path | None, resume: str) -> str:
    """Where the newest checkpoint of a run is, and what a next start does. resume: run.resume."""
    if saved is None:
        return "none was saved (checkpoint.every_steps=-1): the same command starts anew"
    return f"{saved}; " + (
        "run.resume=auto goes on from it, the same command starts anew" if resume == "never"
        else "the same command goes on from it")


def resume_keys(recipe: Recipe) -> dict:
    """What of the recipe a checkpoint records, to be compared when the run is resumed."""
    train = recipe.train
    return {"seed": recipe.run.seed, "model": asdict(recipe.model),
            "num_validation": recipe.data.num_validation, "param_dtype": recipe.fsdp.param_dtype,
            "order": _order_keys(recipe),
            "batch_size": train.batch_size, "accumulation_steps": train.accumulation_steps,
            "chosen_global_batch_size": train.global_batch_size}


def _order_keys(recipe: Recipe) -> dict:
    """What the order of examples depends on, beside the data, the seed and the batch."""
    data = recipe.data
    repeats = [source.repeats for source in data.sources]
    return {"shuffle_window": data.shuffle_window, "batching": data.batching,
            "max_batch_tokens": data.max_batch_tokens, "max_batch_images": data.max_batch_images,
            "sources.repeats": repeats if any(k > 1 for k in repeats) else [],
            "batching with train.batch_size": (data.batching == "capped"
                                               and recipe.train.batch_size)}


def _check_batch(state: dict, recipe: Recipe) -> None:
    """Raises ValueError if the recipe asks for another number of examples a step than the
    checkpoint's, which a resumed run keeps on any number of ranks."""
    train, kept = recipe.train, state["global_batch_size"]
    wanted = train.global_batch_size
    if wanted and wanted != kept:
        raise ValueError(f"train.global_batch_size is {wanted}, the checkpoint has {kept}: "
                         "examples would repeat or be left out")
    if wanted or "batch_size" not in state:  # saved before it was recorded
        return
    cure = (f"a resumed run keeps its {kept} examples a step, or examples would repeat or be left "
            f"out: restore it, set train.global_batch_size={kept}, or choose another run.dir")
    if state["chosen_global_batch_size"]:
        raise ValueError(f"train.global_batch_size is not set, the checkpoint has {kept}; {cure}")
    keys = [k for k in ("batch_size", "accumulation_steps") if getattr(train, k) != state[k]]
    per_rank = state["batch_size"] * state["accumulation_steps"]
    if keys and train.batch_size * train.accumulation_steps != per_rank:
        named = " and ".join(f"train.{k} is {getattr(train, k)}, the checkpoint has {state[k]}"
                             for k in keys)
        raise ValueError(f"{named}; {cure}")


def _check_model(saved: dict, model: ModelConfig) -> None:
    """Raises ValueError naming a key of another value than that of the checkpoint."""
    default = asdict(ModelConfig())
    for part in PHASES:
        start = saved[part].get("pretrained", "")
        for key, value in asdict(getattr(model, part)).items():
            was = saved[part].get(key, default[part][key])  # a key that came later
            if was == value or key == "pretrained":  # where it started does not matter any more
                continue
            cure = "use the same model, or another run.dir, or run.resume=never"
            if start and not getattr(model, part).pretrained and value == default[part][key]:
                cure = (f"that was read in {start}/config.json perhaps, and is not while "
                        f"model.{part}.pretrained is empty: start from recipe.yaml in run.dir, "
                        "which holds every value")
            raise ValueError(f"model.{part}.{key} is {value}, the checkpoint has {was}: {cure}")


def _check_data(was: dict, now: dict) -> None:
    """Raises ValueError naming what differs between the data of a checkpoint and the data of now.
    What older checkpoints do not record is not compared."""
    tokenizer, lengths = ([x.pop(key, None) for x in (was, now)] for key in (
        "tokenizer", "lengths"))
    go_on = "set run.allow_data_change=true to go on"
    if tokenizer[0] not in (None, tokenizer[1]):
        raise ValueError(
            "data.tokenizer gives other token ids than the one of the checkpoint: the same text "
            "would mean something else to the model; restore that tokenizer and chat template, or "
            f"{go_on} with the new one")
    if was != now:
        raise ValueError(f"the data changed since the checkpoint: was {was}, is {now}; restore it, "
                         f"or {go_on} at the same step of the new data")
    if lengths[0] not in (None, lengths[1]):
        raise ValueError(
            "the examples have other lengths than at the checkpoint, so data.batching=capped would "
            "form other mini-batches, and examples would repeat or be left out. "
            "data.max_example_tokens or a key of a source (prompt, video_fps, ...) was changed, or "
            "the index was built again after media files were; restore them and build it again "
            f"(orchmllm data index RECIPE), or {go_on} at the same step of the new order")
