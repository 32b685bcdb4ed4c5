"""Imported once by the tests' fork server (see tests/lib/ranks.py)."""

import hypothesis  # noqa: F401
import psutil  # noqa: F401
import pytest  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
import transformers.models.qwen2.modeling_qwen2  # noqa: F401

import orchmllm.trainer  # noqa: F401
