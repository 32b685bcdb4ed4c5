"""Examples made from their index alone, on which the doctor's self-test trains, too."""

from dataclasses import replace

from orchmllm.tools.doctor.synthetic import MODEL, VOCAB, SyntheticDataset, recipe

__all__ = ["MODEL", "SHALLOW", "VOCAB", "SyntheticDataset", "recipe"]
SHALLOW = replace(MODEL, **{p: replace(getattr(MODEL, p), num_layers=1)
                            for p in ("vision", "audio", "llm")})
