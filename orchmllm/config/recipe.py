"""The sections of a recipe: defaults < YAML file < `a.b=c` on the command line, checked before
torch is imported. orchmllm.config.schema says how a key is written, orchmllm.config.parse how a
file becomes these classes; docs/recipe.md is made from them.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchmllm.config.balance import BalanceConfig
from orchmllm.config.data import DataConfig, RemoteConfig, RemoteRoot, SourceConfig
from orchmllm.config.fsdp import FsdpConfig, layer_counts
from orchmllm.config.model import ModelConfig
from orchmllm.config.parse import Loaded, RecipeError, explain, read, to_yaml
from orchmllm.config.schema import MAX_INT, Conflict, did_you_mean, key, section
from orchmllm.config.train import TRAIN_PARTS, TrainConfig
from orchmllm.plan.assign import EVERY_PHASE

__all__ = ["TRAIN_PARTS", "DataConfig", "FsdpConfig", "Recipe", "RecipeError", "RemoteConfig",
           "RemoteRoot", "SourceConfig", "TrainConfig", "explain", "load_recipe", "read_recipe",
           "to_yaml"]

TRACKERS = ("tensorboard", "wandb")  # names of packages


@dataclass(frozen=True)
class RunConfig:
    """What a run is called, starts from and writes."""

    dir: str = key("runs/default", "Folder of logs, checkpoints and the merged recipe; one run "
                   "at a time writes it.",
                   aliases=("output_dir", "out_dir", "save_dir"))
    seed: int = key(0, "Seed of the initial weights and of the sampling.", at_least=0)
    resume: str = key("auto", "`auto`: go on from the newest sound checkpoint of run.dir, if there "
                      "is one. `never`: start from scratch, also after a failure, and set aside "
                      "what is in run.dir. The path of a checkpoint: branch off from it; later "
                      "starts go on with what was saved since.",
                      aliases=("resume_from_checkpoint",))
    init_from: str = key("", "Run folder (its newest checkpoint) or checkpoint folder whose "
                         "weights a new run starts from (docs/stages.md). For an export, set "
                         "model.pretrained instead.",
                         aliases=("load_from", "init_checkpoint"))
    allow_data_change: bool = key(False, "Resume although the data, or what decides their order, "
                                  "has changed (docs/design.md).")
    trackers: tuple[str, ...] = key((), "Programs that also get the scalars of every step: "
                                    "`tensorboard` and `wandb` (docs/report.md).",
                                    aliases=("tensorboard", "wandb", "report_to", "logger"))

    @property
    def folder(self) -> Path:
        """`dir` as a path."""
        return Path(self.dir)

    @property
    def start(self) -> str:
        """`resume`; `auto` where that checkpoint is gone, and the newest one of this run goes back
        to it, by what its attempt and those before record (orchmllm.runtime.attempts)."""
        if self.resume in ("auto", "never") or Path(self.resume).exists():
            return self.resume
        root, log = self.folder / "checkpoints", self.folder / "attempts.jsonl"
        try:
            newest = root / (root / "latest").read_text(encoding="utf-8")
            attempt = json.loads((newest / "state.json").read_text(encoding="utf-8"))["attempt"]
            lines = log.read_text(encoding="utf-8").split("\n")[:-1] if log.exists() else ()
            earlier = {a["attempt"]: a for a in map(json.loads, lines) if "settings" in a}
            while (at := Path(attempt["resumed_from"]["checkpoint"])) != Path(self.resume):
                here = at.resolve().parent == root.resolve()  # else it branched off elsewhere
                attempt = earlier[attempt["resumed_from"]["attempt"]] if here else {}
        except (OSError, ValueError, LookupError, TypeError):
            return self.resume
        return "auto"

    def conflicts(self) -> Iterator[Conflict]:
        """run.resume: a path has to exist, or to have led to what is there; run.dir cannot be
        empty; run.trackers: known ones, once, whose packages are installed."""
        for name in dict.fromkeys(self.trackers):
            if name not in TRACKERS:
                yield Conflict(("trackers",), did_you_mean(name, TRACKERS)
                               + f"choose of {', '.join(TRACKERS)}")
            elif importlib.util.find_spec(name) is None:
                yield Conflict(("trackers",), f"the package {name} is not installed: pip install "
                               f"{name}, or leave it out")
            elif self.trackers.count(name) > 1:
                yield Conflict(("trackers",), f"{name} is there twice: name it once")
        if not self.dir.strip():
            yield Conflict(("dir",), "give a folder")
        if self.start not in ("auto", "never") and not Path(self.resume).exists():
            yield Conflict(("resume",), "no such folder: choose auto, never or the path of a "
                           "checkpoint")


@dataclass(frozen=True)
class LaunchConfig:
    """How ranks are started and watched."""

    nproc_per_node: int = key(0, "Ranks to start where torchrun or SLURM has not started them; 0: "
                              "one per GPU.", at_least=0)
    timeout_s: int = key(600, "Seconds after which a collective fails that a rank has not joined.",
                         at_least=1, at_most=10**8)
    stall_timeout_s: int = key(300, "Seconds without progress after which the late rank is named "
                               "and the run ends.", at_least=1)

    def conflicts(self) -> Iterator[Conflict]:
        """launch.stall_timeout_s has to be below launch.timeout_s."""
        if self.stall_timeout_s >= self.timeout_s:
            yield Conflict(
                ("stall_timeout_s", "timeout_s"),
                f"must be below launch.timeout_s ({self.timeout_s}), so that the late rank is "
                "named before its collective fails")


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved."""

    every_steps: int = key(0, "Steps between checkpoints; 0: only at the end and when stopped, "
                           "-1: never.", at_least=-1, aliases=("save_steps", "interval"))
    every_minutes: float = key(30.0, "Minutes after which the run is saved if it was not saved "
                               "since; 0: never. Such a save never ends the run.", at_least=0)
    keep_last: int = key(2, "How many sound checkpoints of the run are kept; those of other "
                         "runs are renamed to aside_... and kept, too.", at_least=1,
                         aliases=("save_total_limit",))
    asynchronous: bool = key(True, "Write in a thread while training goes on.")


WINDOW = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")  # steps: `10` or `10-12`


@dataclass(frozen=True)
class ProfileConfig:
    """A closer look at some steps."""

    steps: str = key("", "Steps to record as Chrome traces in run.dir/profile, such as `10` or "
                     "`10-12`; empty: none.")
    num_ranks: int = key(1, "How many ranks record, from rank 0 on.", at_least=1)

    @property
    def window(self) -> range:
        """The steps; none where they are not written so, or the last is before the first."""
        found = WINDOW.fullmatch(self.steps)
        return range(int(found[1]), int(found[2] or found[1]) + 1) if found else range(0)

    def conflicts(self) -> Iterator[Conflict]:
        """profile.steps: one step, or the first and the last of several."""
        if self.steps and not self.window:
            yield Conflict(("steps",), "write a step, or the first and the last of several: 10-12")


@dataclass(frozen=True)
class Recipe:
    """Everything a run is defined by."""

    run: RunConfig = section(RunConfig)
    launch: LaunchConfig = section(LaunchConfig)
    data: DataConfig = section(DataConfig)
    model: ModelConfig = section(ModelConfig)
    balance: BalanceConfig = section(BalanceConfig)
    train: TrainConfig = section(TrainConfig)
    fsdp: FsdpConfig = section(FsdpConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    profile: ProfileConfig = section(ProfileConfig)

    def conflicts(self) -> Iterator[Conflict]:
        yield from self._of_train()
        if self.train.nonfinite == "rollback" and self.checkpoint.every_steps < 1:
            yield Conflict(("train.nonfinite", "checkpoint.every_steps"),
                           "rollback needs checkpoints: set checkpoint.every_steps to 1 or more")
        if self.train.validate_every_steps and not self.data.num_validation:
            yield Conflict(("train.validate_every_steps", "data.num_validation"),
                           "validates on the rows that data.num_validation holds out: set it")
        if self.train.sample_every and not self.data.num_validation:
            yield Conflict(("train.sample_every", "data.num_validation"),
                           "answers the rows that data.num_validation holds out: set it")
        if self.profile.window and self.profile.window[0] >= self.train.num_steps:
            yield Conflict(("profile.steps", "train.num_steps"), "begins after the last step of "
                           f"the run ({self.train.num_steps - 1})")
        remote = self.data.remote
        if remote.roots and remote.deadline_s >= self.launch.stall_timeout_s:
            yield Conflict(("data.remote.deadline_s", "launch.stall_timeout_s"),
                           f"has to be below launch.stall_timeout_s "
                           f"({self.launch.stall_timeout_s}), so that the file is named")
        if self.balance.group == "shard" and not self.fsdp.shard_size:
            yield Conflict(("balance.group", "fsdp.shard_size"),
                           "one shard holds all ranks: set balance.group to world, or "
                           "fsdp.shard_size to the ranks of a shard")
        yield from self._of_layers()

    def _of_layers(self) -> Iterator[Conflict]:
        """fsdp.*_checkpointing: known words. Layers are counted when the model is read."""
        for phase in EVERY_PHASE:
            choice = self.fsdp.checkpointing(phase)
            try:
                if choice != "auto":
                    layer_counts(choice, MAX_INT)
            except ValueError as e:
                yield Conflict((f"fsdp.{phase}_checkpointing",), str(e))

    def _of_train(self) -> Iterator[Conflict]:
        """Keys of train.* that do not fit those of other sections."""
        train = self.train
        for part in TRAIN_PARTS:
            if self.model.learns(part):
                continue
            fixed, value, cure = f"model.{part}.frozen", "true", "false"
            if part == "connector":
                fixed, value, cure = ("model.lora.connector", "false", "true") if (
                    self.model.lora.rank) else ("model.connectors_frozen", "true", "false")
            for name, unset in ((f"{part}_lr", 0), (f"{part}_weight_decay", -1)):
                if getattr(train, name) != unset:
                    yield Conflict((f"train.{name}", fixed), f"has no effect while {fixed} is "
                                   f"{value}: leave it out, or set that to {cure}")
        if self.data.batching == "capped" and train.global_batch_size % train.batch_size:
            yield Conflict(("train.global_batch_size", "train.batch_size"),
                           f"has to be a multiple of train.batch_size ({train.batch_size}): with "
                           "data.batching=capped so many of its examples stand for one mini-batch")


def read_recipe(path: str | Path, overrides: Sequence[str] | None = None) -> Loaded[Recipe]:
    """Reads, merges and checks a recipe; keeps where each value was written. Raises RecipeError
    listing every problem."""
    try:
        data = Path(path).read_bytes()
    except OSError as e:
        raise RecipeError(f"recipe {path}: {e.strerror or e}") from e
    return read(Recipe, str(path), data, overrides or ())


def load_recipe(path: str | Path, overrides: Sequence[str] | None = None) -> Recipe:
    """Reads, merges and checks a recipe. Raises RecipeError listing every problem."""
    return read_recipe(path, overrides).recipe
