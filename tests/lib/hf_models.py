"""Tiny random Hugging Face models on disk, and the recipe's model of the same shape. Every weight
is random, biases and norms included, so that no two can be mixed up unnoticed."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from orchmllm.batch import SequenceLengths
from orchmllm.config.model import AudioConfig, LLMConfig, ModelConfig, VisionConfig
from orchmllm.hf.describe import part_json
from orchmllm.models.attention import packed_attention
from orchmllm.models.names import named

FRAMES = 100  # mel frames of the tiny Whisper's window

HF_MODEL = ModelConfig(
    vision=VisionConfig(num_layers=2, hidden_size=24, intermediate_size=72, num_heads=2,
                        max_side=112),
    # Heads of 16: Whisper scales queries before attention, and 1/4 is exact.
    audio=AudioConfig(num_layers=2, hidden_size=32, intermediate_size=40, num_heads=2, num_mels=8),
    llm=LLMConfig(vocab_size=64, num_layers=2, hidden_size=40, intermediate_size=56, num_heads=4,
                  num_kv_heads=2, rope_theta=20_000.0),
)


def write_models(root: Path, model: ModelConfig = HF_MODEL, *, dtype=torch.float32, tied=False,
                 max_shard_size: str = "1GB") -> ModelConfig:
    """Writes root/{audio,llm} with transformers and root/vision as an export does; returns the
    model that starts from them. The audio folder is a whole WhisperForConditionalGeneration."""
    torch.manual_seed(0)
    for name, hf in (("audio", whisper(model.audio)), ("llm", qwen2(model.llm, tied))):
        hf.to(dtype).save_pretrained(root / name, max_shard_size=max_shard_size)
    (root / "vision").mkdir()
    save_file({n.hf: torch.randn(n.shape, dtype=dtype) * 0.05 for n in named("vision", model)},
              root / "vision" / "model.safetensors")
    for name, content in part_json("vision", model, str(dtype).removeprefix("torch.")).items():
        (root / "vision" / name).write_text(json.dumps(content))
    return from_folders(model, root)


def from_folders(model: ModelConfig, root: Path, *parts: str) -> ModelConfig:
    return replace(model, **{part: replace(getattr(model, part), pretrained=str(root / part))
                             for part in parts or ("vision", "audio", "llm")})


def whisper(a: AudioConfig) -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    small = {f"decoder_{k}": v for k, v in (("layers", 1), ("attention_heads", 1), ("ffn_dim", 8),
                                            ("start_token_id", 1))}
    return _random(WhisperForConditionalGeneration(WhisperConfig(
        vocab_size=16, num_mel_bins=a.num_mels, d_model=a.hidden_size,
        encoder_layers=a.num_layers, encoder_attention_heads=a.num_heads,
        encoder_ffn_dim=a.intermediate_size, max_source_positions=FRAMES // 2,
        max_target_positions=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, **small)))


def qwen2(c: LLMConfig, tied: bool = False) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return _random(Qwen2ForCausalLM(Qwen2Config(
        vocab_size=c.vocab_size, num_hidden_layers=c.num_layers, hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size, num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads, rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=tied, bos_token_id=3, eos_token_id=5)))


@torch.no_grad()
def _random(hf: nn.Module) -> nn.Module:
    for name, p in hf.named_parameters():
        if "embed_positions" not in name:
            p.add_(torch.randn(p.shape) * 0.05)
    return hf


def edit_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def write_checkpoint(folder: Path, model: ModelConfig, shards: int, **state: object) -> float:
    """A checkpoint of random weights without optimizer, as `shards` ranks save it; returns MB.
    state: more that state.json says."""
    folder.mkdir(parents=True)
    files: list[tuple[dict, dict]] = [({}, {}) for _ in range(shards)]
    for part in ("vision", "audio", "llm", "connectors"):
        for n in named(part, model):
            row = 0
            for (tensors, places), rows in zip(files, torch.rand(n.shape).chunk(shards),
                                               strict=False):
                tensors[f"model.{n.name}"] = rows.contiguous()
                places[f"model.{n.name}"] = {
                    "saved_offsets": [row] + [0] * (tensors[f"model.{n.name}"].dim() - 1)}
                row += len(rows)
    for k, (tensors, places) in enumerate(files, 1):
        save_file(tensors, folder / f"shard-{k:05d}-model-00001-of-00001.safetensors",
                  metadata={"DCP_SHARDING_INFO": json.dumps(places)})
    (folder / "state.json").write_text(json.dumps(
        {"step": 1, "model": asdict(model), **state}))
    return sum(f.stat().st_size for f in folder.glob("*.safetensors")) / 1e6


def register_packed_attention() -> str:
    """Makes our attention known to transformers and returns its name: a model of transformers that
    is called with `packed_seqlens` then computes attention with the same kernels as ours."""
    from transformers import AttentionInterface, AttentionMaskInterface

    name = "test_packed"  # no "flash" in it: transformers treats such names specially
    AttentionInterface.register(name, _packed)
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
    return name


def _packed(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object = None, *,
            packed_seqlens: SequenceLengths, scaling: float, **_: object) -> tuple[Tensor, None]:
    """query (1, Hq, R, Dh), key and value (1, Hkv, R, Dh) -> ((1, R, Hq, Dh), None)."""
    assert abs(scaling * query.shape[-1]**0.5 - 1) < 1e-6
    q, k, v = [x.squeeze(0).transpose(0, 1) for x in (query, key, value)]
    out = packed_attention(q, k, v, packed_seqlens, causal=bool(module.is_causal))
    return out.unsqueeze(0), None
