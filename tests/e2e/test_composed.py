"""A composed model through the commands: from the folders of its parts to a folder that a process
with transformers and `import orchmllm` alone answers with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchmllm.runtime.metrics import read_rows
from tests.lib import composed
from tests.lib.commands import python
from tests.lib.rows import losses
from tests.sharding.test_composed import write_rows

RECIPE = """\
model: {pretrained: model}
data: {path: data.jsonl, num_validation: 4, num_workers: 0}
train:
  num_steps: 4
  global_batch_size: 4
  lr: 1.0e-2
  warmup_steps: 0
  schedule: wsd
  sample_every: 4
  sample_tokens: 7
  num_samples: 4
fsdp: {param_dtype: float64}
checkpoint: {every_steps: 2}
"""
# What a stranger writes: greedy answers to the first questions of the last four rows.
STRANGER = """
import json
import orchmllm
from transformers.models.whisper.modeling_whisper import WhisperEncoder
import soundfile, torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, AutoProcessor

model = AutoModelForMultimodalLM.from_pretrained("exported")
processor = AutoProcessor.from_pretrained("exported", backend="pil")
for line in open("data.jsonl").readlines()[-4:]:
    [asked, _] = json.loads(line)["messages"]
    text = processor.apply_chat_template([asked], add_generation_prompt=True, tokenize=False)
    images = [Image.open(p["image"]) for p in asked["content"] if p["type"] == "image"]
    clips = [soundfile.read(p["audio"], dtype="float32")[0] for p in asked["content"]
             if p["type"] == "audio"]
    given = processor(text=[text], images=[images] if images else None, audio=clips or None,
                      audio_kwargs={"sampling_rate": 16000}, return_tensors="pt")
    given = {n: v.to(model.dtype) if v.is_floating_point() else v for n, v in given.items()}
    n = given["input_ids"].shape[1]
    end = processor.tokenizer.convert_tokens_to_ids("<end>")
    out = model.generate(**given, max_new_tokens=7, do_sample=False, eos_token_id=end,
                         pad_token_id=end)[0, n:].tolist()
    print(json.dumps(processor.tokenizer.decode([i for i in out if i != end])))
alone = AutoModelForCausalLM.from_pretrained("exported/llm")
assert torch.equal(alone.model.norm.weight, model.model.language_model.norm.weight)
hears = WhisperEncoder.from_pretrained("exported/audio")
assert torch.equal(hears.layer_norm.weight, model.model.audio_tower.layer_norm.weight)
"""


def run(folder: Path, *args: str) -> str:
    out = python(*args, cwd=folder)
    assert out.returncode == 0, out.stderr
    return out.stdout


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.whole
@pytest.mark.parametrize("name", ["siglip_whisper_qwen2", "qwen2_vl_whisper_llama"])
def test_compose_train_resume_export_and_answer(name, tmp_path):
    """Weights are read from the folders of the parts; connectors are the same on 2 ranks and 3."""
    parts = composed.write_parts(name, tmp_path)
    write_rows(tmp_path, name)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    told = run(tmp_path, "-m", "orchmllm", "compose", "--vision", str(parts.vision), "--audio",
               str(parts.audio), "--llm", str(parts.llm), "--out", "model")
    assert "pretrained: model" in told and not [*(tmp_path / "model").glob("*.safetensors")]
    train = ("-m", "orchmllm", "train", "recipe.yaml")
    run(tmp_path, *train, "run.dir=sampled", "balance.enabled=false", "launch.nproc_per_node=3")
    run(tmp_path, *train, "run.dir=balanced", "train.num_steps=2", "launch.nproc_per_node=2")
    told = run(tmp_path, *train, "run.dir=balanced", "launch.nproc_per_node=3")
    assert "saved on 2 ranks, now 3" in told
    assert losses(tmp_path / "balanced") == pytest.approx(losses(tmp_path / "sampled"), rel=1e-10)
    assert len(losses(tmp_path / "balanced")) == 4
    run(tmp_path, "-m", "orchmllm", "export", "balanced", "--out", "exported")
    answers = [json.loads(line) for line in run(tmp_path, "-c", STRANGER).splitlines()]
    asked = read_rows(tmp_path / "balanced" / "samples.jsonl")[-4:]
    assert answers == [row["answer"] for row in asked]
