"""Section of a recipe on steps, batches and the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from orchmllm.config.schema import Conflict, key

TRAIN_PARTS = ("vision", "audio", "connector", "llm", "generator")
# What the optimizer (orchmllm.sharding.optimizer) keeps of a parameter that learns, in its shape.
OPTIMIZER_STATE = ("exp_avg", "exp_avg_sq")
LR_OF_PART = "Learning rate of this part; 0: train.lr."
DECAY_OF_PART = "Weight decay of this part; below 0: train.weight_decay."


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
    sample_every: int = key(0, "Steps between answers of the model to rows of "
                            "data.num_validation, written to samples.jsonl in run.dir; 0: never.",
                            at_least=0)
    num_samples: int = key(4, "How many of these rows it answers.", at_least=1)
    sample_tokens: int = key(48, "Most tokens of an answer.", at_least=1)
    lr: float = key(1e-3, "Peak learning rate.", above=0,
                    aliases=("learning_rate",))
    vision_lr: float = key(0.0, LR_OF_PART, at_least=0)
    audio_lr: float = key(0.0, LR_OF_PART, at_least=0)
    connector_lr: float = key(0.0, LR_OF_PART, at_least=0)
    llm_lr: float = key(0.0, LR_OF_PART, at_least=0)
    generator_lr: float = key(0.0, LR_OF_PART, at_least=0)
    generator_loss_weight: float = key(1.0, "The loss of the images that are made is multiplied by "
                                       "this and added to that of the text (docs/generator.md).",
                                       above=0)
    warmup_steps: int = key(10, "Steps in which the learning rate rises to train.lr.", at_least=0)
    schedule: str = key("cosine", "How it falls after that. With `wsd` it stays, and falls "
                        "linearly in the last train.decay_ratio of the steps.",
                        choices=("cosine", "wsd"), aliases=("lr_scheduler_type",))
    decay_ratio: float = key(0.1, "Share of the steps in which it falls with `wsd`.", above=0,
                             at_most=1)
    min_lr_ratio: float = key(0.1, "Share of train.lr that is left at the last step.", at_least=0,
                              at_most=1)
    weight_decay: float = key(0.01, "AdamW's decoupled weight decay; norms, biases and the token "
                              "embedding have none.", at_least=0)
    vision_weight_decay: float = key(-1.0, DECAY_OF_PART, at_least=-1)
    audio_weight_decay: float = key(-1.0, DECAY_OF_PART, at_least=-1)
    connector_weight_decay: float = key(-1.0, DECAY_OF_PART, at_least=-1)
    llm_weight_decay: float = key(-1.0, DECAY_OF_PART, at_least=-1)
    generator_weight_decay: float = key(-1.0, DECAY_OF_PART, at_least=-1)
    beta1: float = key(0.9, "AdamW's decay of the mean of the gradients.", at_least=0, below=1,
                       aliases=("adam_beta1", "betas"))
    beta2: float = key(0.95, "That of the mean of their squares.", at_least=0, below=1,
                       aliases=("adam_beta2",))
    max_grad_norm: float = key(1.0, "Gradients are scaled down to this norm; 0: never.",
                               at_least=0, aliases=("grad_clip", "clip_grad_norm"))
    global_batch_size: int = key(0, "Examples of a step, kept when a run resumes on another "
                                 "number of ranks; 0: batch_size * accumulation_steps * ranks. "
                                 "With data.batching=capped batch_size of them stand for one "
                                 "mini-batch.", at_least=0)
    nonfinite: str = key(
        "raise", "What happens where the loss or a gradient is not finite: the run ends with an "
        "error, the step is skipped, or the run goes back to its last checkpoint and skips the "
        "step when it comes again.",
        choices=("raise", "skip", "rollback"))
    max_skipped_in_a_row: int = key(10, "So many of these steps in a row end the run with an error "
                                    "and no further checkpoint; steps without targets do not "
                                    "count. 0: no limit.", at_least=0)

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
