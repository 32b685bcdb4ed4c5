"""What a checkpoint is of: its run's newest one, its model's shapes, its tokenizer."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from orchmllm.config.model import LoraConfig, ModelConfig, PartConfig
from orchmllm.plan.assign import EVERY_PHASE


def checkpoint_in(folder: Path) -> Path:
    """The checkpoint that a folder is, or the newest one of a run folder. Raises ValueError."""
    from orchmllm.runtime.lineage import list_saved

    if (folder / "state.json").is_file():
        return folder
    saved = [s.path for s in list_saved(folder / "checkpoints") if s.sequence >= 0]
    if not saved:
        raise ValueError(f"{folder} is no checkpoint and no run folder with one: give the run.dir "
                         "of a run, or a folder run.dir/checkpoints/step_...")
    return saved[0]


def check_files(checkpoint: Path, cure: str) -> None:
    """Raises ValueError, with the cure, where its files are not what was saved."""
    from orchmllm.runtime.lineage import problem_of

    if problem := problem_of(checkpoint):
        raise ValueError(f"checkpoint {checkpoint}: {problem}: {cure}")


def model_of(state: dict) -> ModelConfig:
    """The model section that a checkpoint was saved with. Raises ValueError for that of another
    version."""
    try:
        model = state["model"]
        lora = model.get("lora", {})
        return ModelConfig(
            **{part: PartConfig(frozen=model[part]["frozen"]) for part in EVERY_PHASE},
            **{name: model[name] for name in ("pretrained", "config", "connectors_frozen")},
            lora=LoraConfig(**{**lora, "target_modules": tuple(lora.get("target_modules", ()))}))
    except (KeyError, TypeError) as e:
        raise ValueError("state.json is not that of a checkpoint of a run, or of a newer version "
                         f"of orchmllm: {e}") from None


def other_tokenizer(folder: Path, state: dict) -> str:
    """A warning where the tokenizer of a model's folder is not the one whose digest its checkpoint
    records, in its state.json; else "". Raises ValueError where the folder is not there."""
    from orchmllm.data.text.tokenizer import ChatTokenizer

    if not folder.is_dir():
        raise ValueError(f"{folder}, the folder of the model that the checkpoint is of, is not "
                         f"there (seen from {Path.cwd()}): work in the folder in which it was "
                         "trained, or put the model there")
    trained = state["attempt"]["settings"].get("content.tokenizer")
    with suppress(ValueError):  # of a tokenizer that no run can be trained with
        if trained in (None, ChatTokenizer(folder).digest):
            return ""
    return (f"warning: the tokenizer of {folder} is not the one that the checkpoint was trained "
            "with (tokenizer.json, chat template or special tokens): the same text may be other "
            "token ids")
