"""What a run has done so far, as JSON: enough to go on anywhere, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from orchmllm.batch import Step
from orchmllm.comm.errors import AgreedError
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import DataConfig, Recipe
from orchmllm.plan.assign import PHASES
from orchmllm.plan.layout import ENCODERS

VERSION = 1
MIN_MEDIA_FOR_PERCENT = 100
MIN_UNREADABLE = 16  # media of one modality, when none of that modality was ever decoded
_NAMES = {code: name for name, code in ENCODERS.items()}


class NonFiniteError(AgreedError):
    """Loss or gradient is not finite; raised on all ranks before the optimizer step."""


class MediaLimitError(AgreedError):
    """Too many media could not be decoded; raised on all ranks."""


@dataclass
class MediaCount:
    """Media read and failed, and failures in a row at the end of what was read. By modality, those
    that were decoded, and those that were not with what is said of the first."""

    read: int = 0
    failed: int = 0
    in_a_row: int = 0
    decoded: dict[str, int] = field(default_factory=dict)
    unreadable: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def count(self, step: Step, describe: Callable[[int, int], dict]) -> list[dict]:
        """Adds a step's media and unusable rows, in source order; returns the quarantine's lines of
        the failed. describe: (example id, segment) -> source, row and file."""
        failures = {(f.example, f.segment): f for f in step.failed}
        start, lines = step.layout.segment_start, []
        for example, segment in sorted({*step.media, *failures}):
            self.read += 1
            failure = failures.get((example, segment))
            if failure is None:
                self.in_a_row = 0
                name = _NAMES[int(step.layout.modality[start[example] + segment])]
                self.decoded[name] = self.decoded.get(name, 0) + 1
                continue
            self.failed += 1
            self.in_a_row += 1
            index = int(step.example_ids[example])
            lines.append({"step": step.index, "example_id": index, "segment": segment,
                          **describe(index, segment), "reason": failure.reason})
            if failure.modality in _NAMES:
                name = _NAMES[failure.modality]
                self.unreadable[name] = self.unreadable.get(name, 0) + 1
                self.first.setdefault(name, name_of(lines[-1]))
        return lines

    def check(self, limits: DataConfig, lines: list[dict]) -> None:
        """Raises MediaLimitError where the recipe's limits are passed; `lines`: the newest."""
        if not lines:
            return
        if limits.strict:
            raise MediaLimitError(f"data.strict: {name_of(lines[0])}")
        what = name_of(lines[-1])
        if limits.max_failed_in_a_row and self.in_a_row >= limits.max_failed_in_a_row:
            raise MediaLimitError(f"{self.in_a_row} media in a row could not be decoded "
                                  f"(data.max_failed_in_a_row); the last: {what}")
        self.check_modalities(MIN_UNREADABLE)
        percent = 100.0 * self.failed / self.read
        if self.read >= MIN_MEDIA_FOR_PERCENT and percent > limits.max_failed_percent:
            raise MediaLimitError(
                f"{self.failed} of {self.read} media ({percent:.1f}%) could not be decoded, over "
                f"data.max_failed_percent={limits.max_failed_percent}; the last: {what}")

    def check_modalities(self, at_least: int = 1) -> None:
        """Raises MediaLimitError where no medium of a modality could be decoded, of `at_least` so
        many. At the end of a run one is enough."""
        for name, count in self.unreadable.items():
            if count >= at_least and not self.decoded.get(name):
                raise MediaLimitError(
                    f"{name}: none of the {count} media so far could be decoded, so nothing of "
                    f"this modality is learnt; the first: {self.first[name]}. Check the paths in "
                    "the data file and where they start: the media_root of the source (data."
                    "sources), or else the folder of the data file")


def name_of(line: dict) -> str:
    """A line of the quarantine in words."""
    return (f"{line['data_file']}, row {line['row']} (example {line['example_id']}, segment "
            f"{line['segment']}): {line['file']}: {line['reason']}")


@dataclass
class Progress:
    """step: the next one. skipped_steps: steps without an optimizer step. skip: steps whose update
    is left out (after a rollback). global_batch_size: examples per step over all ranks; it stays
    what it was when the number of ranks changes, and with it every global batch.
    nonfinite_in_a_row: steps that were not finite since the last update; what is done again after a
    rollback does not count as one."""

    global_batch_size: int
    step: int = 0
    skipped_steps: int = 0
    skip: list[int] = field(default_factory=list)
    media: MediaCount = field(default_factory=MediaCount)
    nonfinite_in_a_row: int = 0

    @property
    def optimizer_steps(self) -> int:
        return self.step - self.skipped_steps

    def count_update(self, step: int) -> None:
        """Step `step` has updated the parameters."""
        if step > max(self.skip, default=-1):
            self.nonfinite_in_a_row = 0

    def to_json(self) -> dict:
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, state: dict) -> Progress:
        return cls(
            global_batch_size=state["global_batch_size"], step=state["step"],
            skipped_steps=state["skipped_steps"], skip=list(state["skip"]),
            media=MediaCount(**state["media"]),
            nonfinite_in_a_row=state.get("nonfinite_in_a_row", 0))


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
