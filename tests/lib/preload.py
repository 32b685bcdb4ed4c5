"""Imported once by the tests' fork server (see tests/lib/ranks.py): what many ranks import, and
what torch and transformers work out once a process. Each rank would take its seconds for that."""

import gc
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

from orchmllm.config.recipe import FsdpConfig, TrainConfig
from orchmllm.models.families import is_known
from orchmllm.models.whole_flops import part_counts
from orchmllm.models.whole_model import meta_model
from orchmllm.plan.assign import EVERY_PHASE
from orchmllm.sharding.load_whole import load_whole
from orchmllm.sharding.optimizer import make_optimizer
from orchmllm.tools.doctor.synthetic import MODEL, SyntheticDataset


def one_step() -> None:
    """Trains the self-test's model for a step, as the only rank: torch keeps what it works out for
    a mesh, and on a mesh of two ranks it would give the second one the offsets of the first."""
    import_module("torch.testing._internal.distributed.fake_pg")  # which starts no thread
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=1, store=dist.HashStore())
    whole = load_whole(Path(MODEL.folder), MODEL, FsdpConfig(param_dtype="float64"),
                       torch.device("cpu"), dict.fromkeys(EVERY_PHASE, "none"))
    data = SyntheticDataset()
    whole(whole.join([data.load(0), data.load(1)])).backward()
    make_optimizer(whole, TrainConfig()).step()
    dist.destroy_process_group()


gc.disable()  # of what is imported nothing is garbage
for name in (
        "hypothesis", "psutil", "pytest", "transformers.trainer", "orchmllm._core",
        "transformers.models.qwen2.modeling_qwen2", "transformers.models.whisper.modeling_whisper",
        "transformers.models.qwen2_vl.modeling_qwen2_vl",
        "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
        "orchmllm.composition.processing", "orchmllm.composition.whisper",
        "orchmllm.counts.counted", "orchmllm.sharding.build", "orchmllm.trainer",
        "tests.lib.resume"):
    import_module(name)
import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("any")
import_module("PIL.Image").init()
if is_known(version("transformers")):
    one_step()
    meta_model(MODEL.folder)
    part_counts(MODEL)
gc.freeze()  # no rank looks through what was there before it
gc.enable()
