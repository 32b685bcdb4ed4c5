"""What the configuration of a model of transformers says before it is built: whether it can be
trained at all, and which class it is of. Whether it is trained exactly is proven (orchmllm.proof).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# transformers, from the first version with the interfaces that are used to the first that was not
# tried; what a version computes is proven in each.
FIRST, BEFORE = (5, 22), (5, 25)
COMPOSED = "orchmllm_composed"  # the model_type of orchmllm.composition
# After a head: a composition has a head of its own, and the class of the LLM, which reads these,
# is not part of it.
SCALES = ("logit_scale", "logits_scaling", "final_logit_softcapping")


def is_known(version: str) -> bool:
    """Whether this version of transformers is one of those that were tried."""
    return FIRST <= tuple(int(n) for n in version.split(".")[:2]) < BEFORE


def versions() -> str:
    """As pip takes them."""
    return ",".join(f"{sign}{a}.{b}" for sign, (a, b) in ((">=", FIRST), ("<", BEFORE)))


def read_config(folder: Path) -> PreTrainedConfig:
    """The configuration in a folder, of an omni model that of its thinker. Raises ValueError naming
    what of it cannot be trained, and the cure."""
    import transformers

    if not is_known(transformers.__version__):
        raise ValueError(f"transformers {transformers.__version__} is installed, but whole models "
                         f"were tried with {versions()}: pip install 'transformers{versions()}'")
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
    """The class of transformers whose models have such a configuration and write text. Raises
    ValueError if there is none."""
    from transformers import AutoModelForMultimodalLM, AutoModelForSeq2SeqLM

    # The first one has all but audioflamingo3.
    for kind in (AutoModelForMultimodalLM, AutoModelForSeq2SeqLM):
        if type(config) in kind._model_mapping:
            return kind._model_mapping[type(config)]
    raise ValueError(f"model_type is {config.model_type!r}, of which transformers has no model "
                     "that reads media and writes text: choose another model, or train it with "
                     "orchmllm.balance_encoders and BalancedDataLoader (docs/encoders.md, "
                     "docs/loader.md)")


def refusals(config: PreTrainedConfig) -> list[str]:
    """Why a model of this configuration cannot be trained; empty if nothing says so."""
    found = []
    text = config.get_text_config(decoder=True)
    if config.model_type == COMPOSED:
        found += [f"{name} of the text model is {value}, which changes logits in its own class "
                  "alone: choose another LLM" for name in SCALES
                  if (value := getattr(text, name, None)) not in (None, 1)]
    else:
        try:
            model_class(config)
        except ValueError as error:
            found.append(str(error))
    parts = (getattr(config, f"{kind}_config", None) for kind in ("vision", "audio"))
    if any(getattr(part, "quantization_config", None) is not None
           for part in (config, text, *parts)):
        found.append("the weights are quantised: give a folder with weights that are not")
    if getattr(config, "distributed_config", None) is not None:
        found.append("distributed_config asks transformers to divide the model, such as its "
                     "experts, over ranks: take it out, because experts are sharded by FSDP2 here")
    return found
