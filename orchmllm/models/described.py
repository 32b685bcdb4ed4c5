"""What a recipe's model is, before it is built: its tokens, its parts, and what says that it is the
same model."""

from __future__ import annotations

from pathlib import Path

from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import Recipe
from orchmllm.config.train import TrainConfig
from orchmllm.models.families import COMPOSED, read_config
from orchmllm.plan.layout import OF_MEDIA


def check_parts(recipe: Recipe) -> None:
    """Raises ValueError for a learning rate, a weight decay or the weight of a loss of a part that
    the model has not."""
    config = read_config(Path(recipe.model.folder))
    for part in OF_MEDIA:
        for name in (f"{part}_lr", f"{part}_weight_decay", f"{part}_loss_weight"):
            unset = getattr(TrainConfig, name, None)
            if getattr(recipe.train, name, None) != unset and (
                    not hasattr(config, f"{part}_config")):
                raise ValueError(f"train.{name} has no effect with a {config.model_type}, which "
                                 "has no such part: leave it out")


def vocabulary(model: ModelConfig) -> tuple[int, str]:
    """(Tokens of the model's text, what says so). Raises ValueError for a folder that cannot be
    used."""
    config = read_config(Path(model.folder))
    size = config.get_text_config(decoder=True).vocab_size
    while config.model_type == COMPOSED and size in (config.image_token_id, config.audio_token_id):
        size += 1  # it has no embedding and needs none
    return size, f"{model.folder}/config.json: vocab_size"
