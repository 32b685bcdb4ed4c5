"""Imported once by the tests' fork server (see tests/lib/ranks.py): what many ranks import. Each of
them would take its seconds for that."""

import hypothesis  # noqa: F401
import psutil  # noqa: F401
import pytest  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
import transformers.models.qwen2.modeling_qwen2  # noqa: F401
import transformers.trainer  # noqa: F401

import orchmllm.sharding.build  # noqa: F401
import orchmllm.trainer  # noqa: F401
import tests.lib.resume  # noqa: F401
