"""Which models of transformers are trained as they are, and what their parameters are called.

Every family here has been compared with stock transformers, example by example. What is not here,
or is configured to compute something that a packed row would change, is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

TESTED = ("5.23.",)  # versions of transformers, by how they begin
FAMILIES = ("audioflamingo3", "aya_vision", "gemma3", "glm4v", "glm4v_moe", "idefics3", "internvl",
            "llava", "llava_next", "llava_onevision", "mistral3", "qwen2_5_omni", "qwen2_5_vl",
            "qwen2_audio", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe",
            "smolvlm", "vipllava")
COMPOSED = "orchmllm_composed"  # the model_type of orchmllm.composition
_NO_PIL = "has no image processor in transformers that resizes by Pillow"
NOT_EXACT = {
    "cohere2_vision": _NO_PIL, "kimi_k25": _NO_PIL,
    "paligemma": "reads everything before one answer in both directions, so that the answers of a "
                 "conversation would be seen before they are learnt"}
TEXT_MODELS = ("cohere2", "gemma3_text", "glm4v_moe_text", "glm4v_text", "llama", "mistral",
               "mixtral", "qwen2", "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_moe",
               "qwen2_vl_text", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe",
               "qwen3_vl_moe_text", "qwen3_vl_text")
TOWERS = {"visual": "vision", "vision_tower": "vision", "vision_model": "vision",
          "audio_tower": "audio"}
# Connectors that are inside of a tower.
MERGERS = ("merger", "deepstack_merger_list", "proj")
RANDOM = ("dropout", "drop_path", "layerdrop", "jitter")  # in names of settings
SCALES = ("logit_scale", "logits_scaling", "final_logit_softcapping")  # after a head
LANGUAGE = ("language_model", "text_model", "lm_head")


def part_of(name: str) -> str:
    """The part that a parameter of a model of FAMILIES belongs to: vision, audio, connector or
    llm. name: in the model, such as model.visual.merger.norm.weight."""
    first, second, *_ = name.removeprefix("model.").split(".") + [""]
    if first in LANGUAGE:
        return "llm"
    return "connector" if second in MERGERS else TOWERS.get(first, "connector")


def read_config(folder: Path) -> PreTrainedConfig:
    """The configuration in a folder, of an omni model that of its thinker. Raises ValueError naming
    what of it cannot be trained exactly, and the cure."""
    import transformers

    if not transformers.__version__.startswith(TESTED):
        raise ValueError(f"transformers {transformers.__version__} is installed, but whole models "
                         f"were tested with {TESTED[0]}*: pip install 'transformers=={TESTED[0]}*'")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: give a local copy of the model (nothing is "
                         "downloaded)")
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many types: each configuration checks its own values
        raise ValueError(f"{folder}/config.json cannot be read: {' '.join(str(error).split())}"
                         ) from error
    config = getattr(config, "thinker_config", config)
    for why in refusals(config):
        raise ValueError(f"{folder}/config.json: {why}")
    return config


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class of transformers whose models have such a configuration and write text."""
    from transformers import AutoModelForMultimodalLM, AutoModelForSeq2SeqLM

    # The first one has all families but audioflamingo3.
    kinds = (AutoModelForMultimodalLM, AutoModelForSeq2SeqLM)
    return next(kind._model_mapping[type(config)] for kind in kinds
                if type(config) in kind._model_mapping)


def refusals(config: PreTrainedConfig) -> list[str]:
    """Why a model of this configuration cannot be trained exactly; empty if it can."""
    found = []
    if config.model_type.removesuffix("_thinker") not in (*FAMILIES, COMPOSED):
        why = NOT_EXACT.get(config.model_type, "was not tested")
        return [f"model_type is {config.model_type!r}, which {why}: choose a model of "
                f"{', '.join(FAMILIES)}, or train it with orchmllm.balance_encoders and "
                "BalancedDataLoader (docs/encoders.md, docs/loader.md)"]
    text = config.get_text_config(decoder=True)
    if text.model_type not in TEXT_MODELS:
        found.append(f"its text model {text.model_type!r} was not tested: choose one of "
                     f"{', '.join(TEXT_MODELS)}")
    if config.model_type == COMPOSED:
        found += [f"{name} of the text model is {value}, which changes logits in its own class "
                  "alone: choose another LLM" for name in SCALES
                  if (value := getattr(text, name, None)) not in (None, 1)]
    parts = {"text": text} | {kind: getattr(config, f"{kind}_config", None)
                              for kind in ("vision", "audio")}
    if any(getattr(part, "quantization_config", None) is not None
           for part in (config, *parts.values())):
        found.append("the weights are quantised: give a folder with weights that are not")
    if getattr(text, "attn_logit_softcapping", None):
        found.append("attn_logit_softcapping limits attention, which packing does not know: give "
                     "another model")
    if getattr(text, "output_router_logits", False):
        found.append("output_router_logits is true: the routers' own loss is a product of means "
                     "over the examples of a rank, so it would depend on how they are balanced: "
                     "set it to false")
    if getattr(config, "distributed_config", None) is not None:
        found.append("distributed_config asks transformers to divide the model, such as its "
                     "experts, over ranks: take it out, because experts are sharded by FSDP2 here")
    for model, part in parts.items():
        for name, value in vars(part).items() if part is not None else ():
            if any(kind in name for kind in RANDOM) and isinstance(value, float | int) and (
                    value > 0):
                found.append(f"{name} of the {model} model is {value}, and its random numbers "
                             "depend on where an example is: set it to 0")
    return found
