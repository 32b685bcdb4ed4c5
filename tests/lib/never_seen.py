"""A model of images that the project has never seen: it is registered in the process that imports
this module. Its tower, its names and its forward are its own; its LLM is Llama."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForMultimodalLM, AutoProcessor
from transformers.modeling_outputs import BaseModelOutputWithPooling, CausalLMOutputWithPast

from tests.lib.processors import write_processor


class LensConfig(transformers.PreTrainedConfig):
    model_type = "sketch_lens"

    def __init__(self, hidden_size=24, num_layers=3, patch_size=7, image_size=28, **keys):
        self.hidden_size, self.num_layers = hidden_size, num_layers
        self.patch_size, self.image_size = patch_size, image_size
        super().__init__(**keys)


class SketchConfig(transformers.PreTrainedConfig):
    model_type = "sketch"
    sub_configs = {"text_config": AutoConfig, "vision_config": LensConfig}

    def __init__(self, text_config=None, vision_config=None, image_token_id=5, neighbours=False,
                 **keys):
        self.neighbours = neighbours  # whether it looks at all before in a row
        text = text_config or transformers.LlamaConfig(
            vocab_size=400, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2)
        self.text_config = AutoConfig.for_model(**text) if isinstance(text, dict) else text
        self.vision_config = vision_config if isinstance(vision_config, LensConfig) else LensConfig(
            **(vision_config or {}))
        self.image_token_id = image_token_id
        super().__init__(**keys)


class Stroke(nn.Module):
    """A block that mixes the patches of one image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(
            width, width)

    def forward(self, x):
        y = self.up(self.norm(x))
        weights = (y @ y.transpose(1, 2) / y.shape[-1]).softmax(-1)
        return x + self.down(weights @ y)


class Sketching(transformers.PreTrainedModel):
    config_class = SketchConfig
    base_model_prefix = "model"
    _supports_sdpa = _supports_attention_backend = True


class Lens(transformers.PreTrainedModel):
    config_class = LensConfig

    def __init__(self, config):
        super().__init__(config)
        self.pixels = nn.Conv2d(3, config.hidden_size, config.patch_size, config.patch_size)
        self.strokes = nn.ModuleList(Stroke(config.hidden_size) for _ in range(config.num_layers))
        self.post_init()

    def forward(self, pixels):
        x = self.pixels(pixels).flatten(2).transpose(1, 2)
        for stroke in self.strokes:
            x = stroke(x)
        return x


class SketchModel(Sketching):
    def __init__(self, config):
        super().__init__(config)
        self.lens = Lens._from_config(config.vision_config)
        self.bridge = nn.Linear(config.vision_config.hidden_size, config.text_config.hidden_size)
        self.mind = AutoModel.from_config(config.text_config)
        self.post_init()

    def get_input_embeddings(self):
        return self.mind.get_input_embeddings()

    def get_image_features(self, pixel_values, **_):
        states = self.lens(pixel_values)
        return BaseModelOutputWithPooling(last_hidden_state=states,
                                          pooler_output=self.bridge(states))

    def forward(self, input_ids=None, pixel_values=None, inputs_embeds=None, **options):
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            rows = self.get_image_features(pixel_values).pooler_output.to(inputs_embeds)
            at = (input_ids == self.config.image_token_id)[..., None].expand_as(inputs_embeds)
            inputs_embeds = inputs_embeds.masked_scatter(at, rows)
        return self.mind(inputs_embeds=inputs_embeds, **options)


class SketchForConditionalGeneration(Sketching, transformers.GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.model = SketchModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size,
                                 bias=False)
        self.post_init()

    def forward(self, input_ids=None, pixel_values=None, attention_mask=None, position_ids=None,
                inputs_embeds=None, labels=None, **options):
        states = self.model(input_ids, pixel_values, inputs_embeds, attention_mask=attention_mask,
                            position_ids=position_ids, **options).last_hidden_state
        if self.config.neighbours:
            states = states + states.cumsum(1)
        logits = self.lm_head(states)
        loss = None if labels is None else self.loss_function(
            logits=logits, labels=labels, vocab_size=self.config.text_config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


AutoConfig.register("sketch_lens", LensConfig)
AutoConfig.register("sketch", SketchConfig)
AutoModel.register(SketchConfig, SketchModel)
AutoModelForMultimodalLM.register(SketchConfig, SketchForConditionalGeneration)
AutoProcessor.register(SketchConfig, transformers.LlavaProcessor)


def write(folder: Path, neighbours: bool = False) -> None:
    """The model with weights, and the processor of a LLaVA."""
    write_processor("llava", folder)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    config = SketchConfig(image_token_id=words.convert_tokens_to_ids("<image>"),
                          neighbours=neighbours)
    config.text_config.vocab_size = len(words)
    torch.manual_seed(0)
    SketchForConditionalGeneration(config).save_pretrained(folder)
