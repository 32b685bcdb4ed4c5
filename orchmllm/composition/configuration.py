"""The configuration of a composed model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from orchmllm.models.families import COMPOSED


class ComposedConfig(PreTrainedConfig):
    """text_config, vision_config, audio_config: of the LLM and of the towers alone, of which one
    may be missing. image_token_id, audio_token_id: tokens that stand for a row of features.
    spatial_merge_size: m x m patches of an image become one row (1 of a tower that merges them
    itself); image_size: height and width in pixels of the images or tiles that a tower for images
    of one size gets, which may have been trained with others; audio_stack: positions of a clip
    that become one; audio_packed: a clip is encoded without silence after it, by Whisper's encoder
    (orchmllm.composition.whisper), and not as a window of one length.
    generator_config: of a model that makes images: `transformer`, the configuration of diffusers,
    with its class; `side`, pixels of the side of a square, one of its rows; `max_pixels` of an
    image, which is made smaller; `condition_dropout`, share of the images that are learnt without
    a condition; `token_id`, the token after which an image is made."""

    model_type = COMPOSED
    def __init__(
        self, text_config: Any = None, vision_config: Any = None, audio_config: Any = None, *,
        image_token_id: int | None = None, audio_token_id: int | None = None,
        spatial_merge_size: int = 1, image_size: Sequence[int] | None = None, audio_stack: int = 2,
        audio_packed: bool = False, generator_config: dict[str, Any] | None = None, **options: Any,
    ) -> None:
        for name, part in (("text_config", text_config), ("vision_config", vision_config),
                           ("audio_config", audio_config)):
            if isinstance(part, dict):
                part = AutoConfig.for_model(**part)
            if part is not None:
                setattr(self, name, part)
        self.image_token_id, self.audio_token_id = image_token_id, audio_token_id
        self.spatial_merge_size, self.audio_stack = spatial_merge_size, audio_stack
        self.image_size, self.audio_packed = image_size, audio_packed
        if generator_config:
            self.generator_config = generator_config
        tied = getattr(getattr(self, "text_config", None), "tie_word_embeddings", False)
        super().__init__(**{"tie_word_embeddings": tied, **options})

    @property
    def sub_configs(self) -> dict[str, type]:
        """Where transformers looks for those of the parts."""
        return {name: AutoConfig for name in ("vision_config", "audio_config", "text_config")
                if hasattr(self, name)}


def audio_rows(frames: int, stack: int) -> int:
    """Rows of features of a clip: a convolution halves its frames."""
    return -(-((frames + 1) // 2) // stack)


AutoConfig.register(COMPOSED, ComposedConfig)
