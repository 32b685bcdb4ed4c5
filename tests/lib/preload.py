"""Imported once by the tests' fork server (see tests/lib/ranks.py): what many ranks import, and
what transformers works out once a process. Each of them would take its seconds for that."""

import gc

import hypothesis  # noqa: F401
import psutil  # noqa: F401
import pytest  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
import transformers.models.qwen2.modeling_qwen2  # noqa: F401
import transformers.models.qwen2_vl.modeling_qwen2_vl  # noqa: F401
import transformers.models.whisper.modeling_whisper  # noqa: F401
import transformers.trainer  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import orchmllm.composition.processing  # noqa: F401
import orchmllm.composition.whisper  # noqa: F401
import orchmllm.counts.counted  # noqa: F401
import orchmllm.sharding.build  # noqa: F401
import orchmllm.trainer  # noqa: F401
import tests.lib.resume  # noqa: F401

get_checkpoint_conversion_mapping("any")
gc.freeze()  # no rank looks through what was there before it
