"""Section of a recipe on steps, batches and the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from orchmllm.config.schema import Conflict, key

TRAIN_PARTS = ("vision", "audio", "connector", "llm", "generator")
# What the optimizer (orchmllm.sharding.optimizer) keeps of a parameter that learns, in its shape.
OPTIMIZER_STATE = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class TrainConfig:
    """Steps, batches and the optimizer (AdamW)."""

    num_steps: int = key(100, "Optimizer steps.", at_least=1, aliases=("max_steps", "steps"))
    batch_size: int = key(4, "Examples per rank and microbatch, or per rank and step with "
                          "accumulation_steps=auto.", at_least=1,
                          aliases=("micro_batch_size", "per_device_train_batch_size"))
    accumulation_steps: int = key(1, "Microbatches per step. `auto`: as few in each step as "
                                  "balance.*.max_rank_tokens and a rank's memory (fsdp.memory_gb) "
                                  "allow.", at_least=0, auto=0,
                                  aliases=("gradient_accumulation_steps", "grad_accum"))
    validate_every_steps: int = key(0, "Steps between validations on data.num_validation rows; 0: "
                                    "only before the first step and after the last.", at_least=0,
                                    aliases=("eval_steps", "val_interval"))
    sample_every: int = key(0, "Steps between answers of the model to held-out examples "
                            "(data.num_validation), which go to samples.jsonl in run.dir; 0: "
                            "never.", at_least=0)
    num_samples: int = key(4, "How many held-out examples train.sample_every asks about.",
                           at_least=1)
    sample_tokens: int = key(48, "Tokens of such an answer at most.", at_least=1)
    lr: float = key(1e-3, "Peak learning rate, after warmup_steps of linear warm-up; "
                    "train.schedule then lowers it to lr * min_lr_ratio at num_steps.", above=0,
                    aliases=("learning_rate",))
    vision_lr: float = key(0.0, "For the vision encoder; 0: train.lr.", at_least=0)
    audio_lr: float = key(0.0, "For the audio encoder; 0: train.lr.", at_least=0)
    connector_lr: float = key(0.0, "For the connectors; 0: train.lr.", at_least=0)
    llm_lr: float = key(0.0, "For the LLM; 0: train.lr.", at_least=0)
    generator_lr: float = key(0.0, "For the generator; 0: train.lr.", at_least=0)
    generator_loss_weight: float = key(1.0, "The loss is that of the text and so many times that "
                                       "of the images that are made (docs/generator.md).",
                                       above=0)
    warmup_steps: int = key(10, "Steps until lr is reached.", at_least=0)
    schedule: str = key("cosine", "`cosine`, or `wsd`: lr stays, and falls linearly over the last "
                        "train.decay_ratio of the steps.", choices=("cosine", "wsd"),
                        aliases=("lr_scheduler_type",))
    decay_ratio: float = key(0.1, "Share of the steps over which `wsd` falls.", above=0, at_most=1)
    min_lr_ratio: float = key(0.1, "Share of lr to which train.schedule falls.", at_least=0,
                              at_most=1)
    weight_decay: float = key(0.01, "AdamW's decoupled weight decay; norms, biases and the token "
                              "embedding have none.", at_least=0)
    vision_weight_decay: float = key(-1.0, "For the vision encoder; below 0: train.weight_decay.",
                                     at_least=-1)
    audio_weight_decay: float = key(-1.0, "For the audio encoder; below 0: train.weight_decay.",
                                    at_least=-1)
    connector_weight_decay: float = key(-1.0, "For the connectors; below 0: train.weight_decay.",
                                        at_least=-1)
    llm_weight_decay: float = key(-1.0, "For the LLM; below 0: train.weight_decay.", at_least=-1)
    generator_weight_decay: float = key(-1.0, "For the generator; below 0: train.weight_decay.",
                                        at_least=-1)
    beta1: float = key(0.9, "Decay of the mean of the gradients.", at_least=0, below=1,
                       aliases=("adam_beta1", "betas"))
    beta2: float = key(0.95, "Decay of the mean of their squares.", at_least=0, below=1,
                       aliases=("adam_beta2",))
    max_grad_norm: float = key(1.0, "Gradients are scaled down to this norm; 0: no clipping.",
                               at_least=0, aliases=("grad_clip", "clip_grad_norm"))
    global_batch_size: int = key(0, "Examples per step over all ranks and microbatches, kept when "
                                 "a run resumes on another number of ranks; 0: batch_size * "
                                 "accumulation_steps * ranks. With data.batching=capped batch_size "
                                 "of them stand for one mini-batch.", at_least=0)
    nonfinite: str = key(
        "raise", "What a loss or gradient that is not finite does: `raise`, `skip` the step, or "
        "`rollback` to the last checkpoint and skip the step when it comes again.",
        choices=("raise", "skip", "rollback"))
    max_skipped_in_a_row: int = key(10, "With train.nonfinite=skip or rollback: so many steps in a "
                                    "row that are not finite end the run with an error and no "
                                    "further checkpoint; steps without targets do not count. 0: no "
                                    "limit.", at_least=0)

    @property
    def least_microbatches(self) -> int:
        """Of a step: with accumulation_steps=auto some have more."""
        return self.accumulation_steps or 1

    def lr_of(self, part: str) -> float:
        """Peak learning rate of one of TRAIN_PARTS."""
        return getattr(self, f"{part}_lr") or self.lr

    def weight_decay_of(self, part: str) -> float:
        """Of one of TRAIN_PARTS."""
        own = getattr(self, f"{part}_weight_decay")
        return self.weight_decay if own < 0 else own

    def conflicts(self) -> Iterator[Conflict]:
        """A train.warmup_steps above 10 is at most train.num_steps; train.decay_ratio is of
        `wsd`."""
        if self.warmup_steps > max(self.num_steps, 10):  # a trial run of 5 steps keeps the default
            yield Conflict(("warmup_steps", "num_steps"),
                           f"must be at most train.num_steps ({self.num_steps})")
        if self.schedule != "wsd" and self.decay_ratio != TrainConfig.decay_ratio:
            yield Conflict(("decay_ratio", "schedule"), "has no effect with train.schedule="
                           f"{self.schedule}: leave it out, or choose wsd")
