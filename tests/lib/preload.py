"""Imported once by the tests' fork server (see tests/lib/ranks.py): what many ranks import, and
what transformers works out once a process. Each of them would take its seconds for that."""

import gc
from importlib import import_module

gc.disable()  # of what is imported nothing is garbage
for name in (
        "hypothesis", "psutil", "pytest", "torch.distributed.fsdp", "transformers.trainer",
        "transformers.models.qwen2.modeling_qwen2", "transformers.models.whisper.modeling_whisper",
        "transformers.models.qwen2_vl.modeling_qwen2_vl", "orchmllm.composition.processing",
        "orchmllm.composition.whisper", "orchmllm.counts.counted", "orchmllm.sharding.build",
        "orchmllm.trainer", "tests.lib.resume"):
    import_module(name)
import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("any")
gc.freeze()  # no rank looks through what was there before it
gc.enable()
