"""Predictions for a whole model of transformers: its memory, and what its image processor makes of
the size of an image. Nothing has weights or pixels."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from orchmllm.config.job import Job
from orchmllm.data.media.shapes import of_shapes, sized
from orchmllm.models.families import part_of, read_config
from orchmllm.models.hf import around, feature_width, meta_model
from orchmllm.plan.geometry import SegmentLengths
from orchmllm.sharding.activations import BlockBytes
from orchmllm.sharding.memory import Choice, Loads, MemoryModel
from orchmllm.tools.predict.block_memory import block_bytes


def parameters(folder: str) -> dict[str, int]:
    """Part of the model -> its parameters."""
    whole, counts = meta_model(folder), {}
    layers = {id(p) for stack in whole.blocks().values() for p in stack.parameters()}
    rest = {"vision": "vision front", "llm": "llm embedding and head", "connector": "connector"}
    for name, p in whole.hf.named_parameters():
        part = part_of(name)
        place = f"{part} layers" if id(p) in layers else rest[part]
        counts[place] = counts.get(place, 0) + p.numel()
    return counts


class WholeMemory(MemoryModel):
    """Of the units that are really sharded, and of blocks measured without memory."""

    @classmethod
    def of(cls, job: Job, on_cpu: bool = False) -> WholeMemory:
        model = job.recipe.model
        whole = meta_model(model.folder)
        stacks, text = whole.blocks(), whole.hf.config.get_text_config(decoder=True)
        # The folder still says that it is a whole model; widths and depths are read from the parts.
        described = replace(
            model, vision=replace(model.vision, num_layers=len(stacks["vision"])),
            llm=replace(model.llm, num_layers=len(stacks["llm"]), hidden_size=text.hidden_size,
                        vocab_size=text.vocab_size))
        return super().of(replace(job, recipe=replace(job.recipe, model=described)), on_cpu)

    def _block(self, phase: str) -> BlockBytes:
        if phase == "audio":
            return super()._block(phase)
        return block_bytes(self.model.folder, phase, getattr(self.model, phase).frozen,
                           self.fsdp.forward_dtype)

    def _batch(self, loads: Loads) -> np.ndarray:
        """Pixels in float32, and as the forward pass casts them."""
        front, _ = around(meta_model(self.model.folder))
        values = sum(m.weight[0].numel() for m in front)
        return (loads.phases["vision"].rows * float(values * (4 + self.element))
                + loads.phases["llm"].tokens * 32.0)

    def _features(self, phase: str, loads: Loads) -> np.ndarray:
        return loads.received[phase] * float(self.element * feature_width(self.model.folder))

    def _exchange(self, phase: str, loads: Loads) -> np.ndarray:
        sent = loads.phases[phase].tokens * float(
            self.element * feature_width(self.model.folder))
        return 2 * (sent + self._features(phase, loads))

    def _kept(self, phase: str, loads: Loads, choice: str) -> np.ndarray:
        """Blocks as measured; of the rest the inputs and outputs of its products."""
        lengths, e = loads.phases[phase], self.element
        layers = getattr(self.model, phase).num_layers
        blocks = layers * self._block(phase).kept[choice] * lengths.positions
        if phase == "audio":
            return blocks
        if phase == "llm":  # what the layers get, and the last norm: its input in float32
            return blocks + lengths.tokens * float(
                e * feature_width(self.model.folder) + (4 + 2 * e) * self.model.llm.hidden_size)
        front, connector = around(meta_model(self.model.folder))
        learns = not self.model.vision.frozen
        patch = learns * sum(m.weight[0].numel() + len(m.weight) for m in front)
        token = sum(sum(m.weight.shape[:2]) for m in connector)
        return blocks + float(e * patch) * lengths.rows + float(e * token) * lengths.tokens


class Pictures:
    """What the image processor of a folder makes of the size of an image, by the settings of
    preprocessor_config.json or processor_config.json alone: an image of an example by itself.
    Raises ValueError, saying what is missing."""

    def __init__(self, folder: str) -> None:
        from transformers import PROCESSOR_MAPPING, AutoImageProcessor

        config = read_config(Path(folder))
        merge = getattr(config.vision_config, "spatial_merge_size", None)
        ratio = getattr(config, "downsample_ratio", None)
        cure = "run `orchmllm data index RECIPE` first, so that lengths are those of its own rows"
        if merge is None and ratio is None or config.model_type == "mistral3":
            raise ValueError(f"{folder}: sizes of images cannot be drawn for {config.model_type}, "
                             f"whose tokens its whole processor decides: {cure}")
        try:
            processor = AutoImageProcessor.from_pretrained(folder, backend="pil",
                                                           local_files_only=True)
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(
                f"{folder} has no settings of an image processor that can be read "
                f"(preprocessor_config.json), which say how many patches an image has: copy them "
                f"from the model, or {cure}") from error
        self._processor = of_shapes(processor)
        self._options = getattr(PROCESSOR_MAPPING[type(config)], "images_kwargs", {})
        self._patches = merge**2 if merge else round(1 / ratio**2)  # of a token
        self._patch = int(np.max(config.vision_config.patch_size))
        self.segment_lengths = lru_cache(maxsize=100_000)(self._segment_lengths)

    def _segment_lengths(self, width: int, height: int) -> SegmentLengths:
        """Of an image of so many pixels."""
        out = self._processor([sized(height, width)], return_tensors="np", **self._options)
        if "image_grid_thw" in out:
            t, h, w = out["image_grid_thw"][0].tolist()
        else:
            tiles, _, high, wide = out["pixel_values"].shape
            t, h, w = tiles, high // self._patch, wide // self._patch
        return SegmentLengths(t * h * w, t * h * w, t * h * w // self._patches, (t, h, w))


@lru_cache(maxsize=4)
def pictures(folder: str) -> Pictures:
    return Pictures(folder)
