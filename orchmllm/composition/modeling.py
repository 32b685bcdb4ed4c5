"""Composed models: towers and LLM as transformers has them, and a connector between each tower and
the LLM.

A tower is asked how it is called: one whose forward takes `grid_thw` gets the patches of images of
any size and merges them itself; any other one gets images, or tiles of images, of one size, and its
last positions are those of the patches (class and register tokens come first). A clip is a window
of its tower, silence included, and the positions of its own frames become rows; or, packed, its
own frames alone are encoded.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from importlib import import_module
from itertools import chain
from os import PathLike
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    BaseModelOutputWithPooling,
    CausalLMOutputWithPast,
)

from orchmllm.composition.clips import windows
from orchmllm.composition.configuration import ComposedConfig, audio_rows
from orchmllm.composition.generator import Generator
from orchmllm.composition.weights import load_linked
from orchmllm.models.parts import Connector

# Of each kind of media, what its tower may be given.
MEDIA = {"image": ("pixel_values", "image_grid_thw"),
         "audio": ("input_features", "input_features_mask", "feature_attention_mask")}


@lru_cache
def _class_of(config: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    if config in AutoModel._model_mapping:
        return AutoModel._model_mapping[config]
    module = import_module(config.__module__.replace(".configuration_", ".modeling_"))
    found = [kind for kind in vars(module).values() if isinstance(kind, type)
             and issubclass(kind, PreTrainedModel) and kind.config_class is config]
    if len(found) != 1:
        raise ValueError(f"{config.__name__} is the configuration of {len(found)} models, so its "
                         "tower is not known: give another one")
    return found[0]


def tower_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class of a tower with this configuration; of a model that reads text as well, of its
    encoder. Raises ValueError if none is known."""
    kind = _class_of(type(config))
    if "text" in kind.input_modalities:
        with torch.device("meta"):
            kind = type(kind(config).get_encoder())
    if "input_ids" in inspect.signature(kind.forward).parameters:
        raise ValueError(f"{kind.__name__} reads text: give the folder of a tower")
    return kind


def takes_grids(config: PreTrainedConfig) -> bool:
    """Whether a vision tower takes the patches of images of any size."""
    return "grid_thw" in inspect.signature(tower_class(config).forward).parameters


def width_of(config: PreTrainedConfig) -> int:
    """Of what a tower returns for a row of features of its own."""
    return getattr(config, "out_hidden_size", None) or config.hidden_size


class _Images:
    """get_image_features of a tower for images of one size."""

    def get_image_features(self, pixel_values: Tensor, **_: Any) -> BaseModelOutputWithPooling:
        """pixel_values (n, 3, H, W), of images or tiles; pooler_output (n, rows, width of the
        LLM). Raises ValueError for patches that are not whole squares."""
        m = self.config.spatial_merge_size
        side = int(np.max(self.config.vision_config.patch_size)) * m
        height, width = pixel_values.shape[-2:]
        if height % side >= side // m or width % side >= side // m:
            raise ValueError(f"images of {height} x {width} pixels are not cut into squares of "
                             f"{m} x {m} patches")
        states = self.vision_tower(pixel_values).last_hidden_state
        h, w = height // side, width // side
        squares = states[:, -h * w * m**2:].unflatten(1, (h, m, w, m)).transpose(2, 3)
        rows = self.vision_projector(squares.reshape(-1, m**2, states.shape[-1]))
        return BaseModelOutputWithPooling(
            last_hidden_state=states, pooler_output=rows.unflatten(0, (len(states), h * w)))


class _Grids:
    """get_image_features of a tower for patches of images of any size."""

    def get_image_features(self, pixel_values: Tensor, image_grid_thw: Tensor, **_: Any
                           ) -> BaseModelOutputWithPooling:
        """pixel_values (patches, pixels of one); image_grid_thw (n, 3); pooler_output: rows of each
        image."""
        out = self.vision_tower(pixel_values, grid_thw=image_grid_thw)
        counts = image_grid_thw.prod(1) // self.config.vision_config.spatial_merge_size**2
        rows = self.vision_projector(out.pooler_output)
        return BaseModelOutputWithPooling(last_hidden_state=out.last_hidden_state,
                                          pooler_output=rows.split(counts.tolist()))


class _Windows:
    """get_audio_features of a tower for windows of one length."""

    def get_audio_features(self, input_features: Tensor, input_features_mask: Tensor, **_: Any
                           ) -> BaseModelOutputWithPooling:
        """input_features (n, mel bands, frames of a window); input_features_mask (n, frames): 1 at
        those of the clip; pooler_output: rows of each clip."""
        stack, states = self.config.audio_stack, self.audio_tower(input_features).last_hidden_state
        states = F.pad(states, (0, 0, 0, -states.shape[1] % stack))
        counts = [audio_rows(n, stack) for n in input_features_mask.sum(-1).tolist()]
        kept = torch.cat([clip[: n * stack] for clip, n in zip(states, counts, strict=True)])
        rows = self.audio_projector(kept)
        return BaseModelOutputWithPooling(last_hidden_state=states,
                                          pooler_output=rows.split(counts))


class _Clips:
    """get_audio_features of a tower for clips of any length."""

    def get_audio_features(self, input_features: Tensor, feature_attention_mask: Tensor, **_: Any
                           ) -> BaseModelOutputWithPooling:
        """input_features (n, mel bands, frames); feature_attention_mask (n, frames): 1 at those of
        the clip; pooler_output: rows of each clip."""
        stack, states = self.config.audio_stack, self.audio_tower(
            input_features, feature_attention_mask).last_hidden_state
        frames = np.array(feature_attention_mask.sum(-1).tolist(), np.int64)
        counts = audio_rows(frames, stack)
        groups = windows(states, (frames + 1) // 2, counts, 0, stack, stack)
        rows = self.audio_projector(groups.flatten(0, 1))
        return BaseModelOutputWithPooling(last_hidden_state=states,
                                          pooler_output=rows.split(counts.tolist()))


class ComposedPreTrainedModel(PreTrainedModel):
    config_class = ComposedConfig
    base_model_prefix = "model"
    input_modalities = ("image", "audio", "text")
    supports_gradient_checkpointing = True
    _supports_flash_attn = _supports_sdpa = _supports_flex_attn = True
    _supports_attention_backend = True

    def _init_weights(self, module: nn.Module) -> None:
        generator = getattr(self, "generator", None)
        if generator is None or not any(m is module for m in generator.modules()):
            super()._init_weights(module)
            return
        if module is generator.place:  # so that a transformer with weights is what it was
            init.zeros_(module.weight)
        elif hasattr(module, "reset_parameters"):  # as diffusers has it
            module.reset_parameters()
        for name, parameter in module.named_parameters(recurse=False):
            if name == "scale_shift_table":
                init.normal_(parameter, std=parameter.shape[-1]**-0.5)

    def _get_feat_extract_output_lengths(self, frames: int) -> tuple[int, int]:
        """(Positions, rows of features) of a clip of so many frames, as audio towers of
        transformers tell theirs."""
        return (frames + 1) // 2, audio_rows(frames, self.config.audio_stack)

    @classmethod
    def is_custom_code(cls) -> bool:
        """See PackedWhisperEncoder: initial values of towers are those of their own classes."""
        return False

    @classmethod
    def from_pretrained(cls, folder: str | PathLike | None, *args: Any, **options: Any) -> Any:
        """As of any model; of a folder that `orchmllm compose` wrote, towers and LLM are read from
        the folders of the parts, and connectors are drawn."""
        if not load_linked(folder, options):
            return super().from_pretrained(folder, *args, **options)
        out = super().from_pretrained(None, *args, **options)
        model = out[0] if isinstance(out, tuple) else out
        model.name_or_path = model.config.name_or_path = str(folder)  # peft writes it
        return out


class ComposedModel(ComposedPreTrainedModel):
    """Towers, connectors and LLM without its head. Has get_image_features and get_audio_features
    of the towers that there are."""

    def __new__(cls, config: ComposedConfig | None = None, *_: Any, **__: Any) -> ComposedModel:
        if cls is ComposedModel:
            vision = getattr(config, "vision_config", None)
            kinds = [_Grids if takes_grids(vision) else _Images] if vision else []
            if hasattr(config, "audio_config"):
                kinds.append(_Clips if config.audio_packed else _Windows)
            cls = _with_features(*kinds)
        return super().__new__(cls)

    def __reduce__(self) -> tuple:
        """For pickle, which would look for the class by its name."""
        return ComposedModel.__new__, (ComposedModel, self.config), self.__dict__

    def __init__(self, config: ComposedConfig) -> None:
        """Raises ValueError for a tower whose images change each other."""
        super().__init__(config)
        width = config.text_config.hidden_size
        if vision := getattr(config, "vision_config", None):
            self.vision_tower = tower_class(vision)._from_config(vision)
            self.vision_projector = Connector(
                width_of(vision), config.spatial_merge_size**2, width)
        if audio := getattr(config, "audio_config", None):
            if config.audio_packed:  # transformers may be importing what it is made of until then
                from orchmllm.composition.whisper import PackedWhisperEncoder as tower
            else:
                tower = tower_class(audio)
            self.audio_tower = tower._from_config(audio)
            self.audio_projector = Connector(width_of(audio), config.audio_stack, width)
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in self.modules()):
            raise ValueError("a tower has batch normalisation, by which images that are encoded "
                             "together change each other: choose another one")
        self.language_model = AutoModel.from_config(config.text_config)
        self.post_init()

    def forward(
        self, input_ids: Tensor | None = None, pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None, input_features: Tensor | None = None,
        input_features_mask: Tensor | None = None, feature_attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None, **options: Any,
    ) -> BaseModelOutputWithPast:
        """The last hidden states, (b, n, width), of what `embedded` takes. options: of the LLM."""
        rows = self.embedded(
            input_ids, inputs_embeds, pixel_values=pixel_values, image_grid_thw=image_grid_thw,
            input_features=input_features, input_features_mask=input_features_mask,
            feature_attention_mask=feature_attention_mask)
        return self.language_model(inputs_embeds=rows, **options)

    def embedded(self, input_ids: Tensor | None, inputs_embeds: Tensor | None = None,
                 **media: Tensor | None) -> Tensor:
        """What the LLM is given, (b, n, width), of input_ids (b, n), or of their inputs_embeds (b,
        n, width); media are as get_image_features and get_audio_features take them, and come with
        input_ids, which say where their rows are. Raises ValueError where these are more or fewer
        than the tokens that stand for them."""
        rows = self._embedded(input_ids) if inputs_embeds is None else inputs_embeds
        for kind, names in MEDIA.items():
            given = {n: media[n] for n in names if media.get(n) is not None}
            if names[0] in given:  # generate keeps the others after the first step
                features = getattr(self, f"get_{kind}_features")(**given).pooler_output
                token = getattr(self.config, f"{kind}_token_id")
                rows = _placed(rows, input_ids, token, features)
        return rows

    def _embedded(self, ids: Tensor) -> Tensor:
        """Tokens that were added for media have no row in the table of the LLM."""
        table, size = self.get_input_embeddings(), self.config.text_config.vocab_size
        for token in (self.config.image_token_id, self.config.audio_token_id):
            if token is not None and token >= size:
                ids = ids.masked_fill(ids == token, 0)
        return table(ids)


@lru_cache
def _with_features(*kinds: type) -> type[ComposedModel]:
    """What is read of the methods' arguments has to be true of the towers that there are."""
    return type(ComposedModel.__name__, (*kinds, ComposedModel), {"__module__": __name__})


def _placed(embeds: Tensor, ids: Tensor, token: int, features: Tensor | Any) -> Tensor:
    """embeds (b, n, d) with rows of features, in order, where ids (b, n) are `token`."""
    rows = features.flatten(0, -2) if isinstance(features, Tensor) else torch.cat(list(features))
    at = ids == token
    if int(at.sum()) != len(rows):
        raise ValueError(f"{len(rows)} rows of features for {int(at.sum())} tokens {token}")
    return embeds.masked_scatter(at[..., None].expand_as(embeds), rows.to(embeds))


class ComposedForConditionalGeneration(ComposedPreTrainedModel, GenerationMixin):
    """With the head of the LLM."""

    _tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}

    def __init__(self, config: ComposedConfig) -> None:
        super().__init__(config)
        self.model = ComposedModel(config)
        text = config.text_config
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        if hasattr(config, "generator_config"):
            self.generator = Generator(config.generator_config, text.hidden_size)
        self.post_init()

    def forward(
        self, input_ids: Tensor | None = None, pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None, input_features: Tensor | None = None,
        input_features_mask: Tensor | None = None, feature_attention_mask: Tensor | None = None,
        attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None, labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0, states_of: Tensor | None = None, **options: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (b, k, vocabulary), see ComposedModel.forward; labels (b, n) as other models take
        them. states_of (s,): positions whose last states, (b, s, width), are given instead of all
        hidden states, for the generator."""
        out = self.model(
            input_ids=input_ids, pixel_values=pixel_values, image_grid_thw=image_grid_thw,
            input_features=input_features, input_features_mask=input_features_mask,
            feature_attention_mask=feature_attention_mask, attention_mask=attention_mask,
            position_ids=position_ids, inputs_embeds=inputs_embeds, **options)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels,
                                      vocab_size=self.config.text_config.vocab_size, **options)
        # The cache has another name from transformers 5.24 on.
        told = {name: value for name, value in out.items()
                if name in CausalLMOutputWithPast.__dataclass_fields__}
        if states_of is not None:
            told["hidden_states"] = out.last_hidden_state[:, states_of]
        return CausalLMOutputWithPast(loss=loss, logits=logits, **told)

    def _expand_inputs_for_generation(self, expand_size: int = 1, **options: Any) -> tuple:
        """Media are encoded before: transformers would repeat each by itself, and not all of an
        example together."""
        if expand_size > 1 and options.get("inputs_embeds") is None:
            media = {name: options.pop(name, None) for name in chain(*MEDIA.values())}
            options["inputs_embeds"] = self.model.embedded(options["input_ids"], **media)
        return super()._expand_inputs_for_generation(expand_size, **options)

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """input_ids: (b, n). Without a cache transformers would forget what was encoded. It asks
        for a `kwargs`."""
        rows = kwargs.get("inputs_embeds")
        if rows is not None and not kwargs.get("use_cache"):
            more = self.model._embedded(input_ids[:, rows.shape[1]:])
            kwargs |= {"inputs_embeds": torch.cat([rows, more], 1), "is_first_iteration": True}
        return super().prepare_inputs_for_generation(input_ids, **kwargs)


AutoModel.register(ComposedConfig, ComposedModel)
for kind in (AutoModelForMultimodalLM, AutoModelForImageTextToText):
    kind.register(ComposedConfig, ComposedForConditionalGeneration)
