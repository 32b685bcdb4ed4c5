"""Examples made from their index alone, on which the doctor's self-test trains, too."""

from orchmllm.doctor.synthetic import MODEL, SHALLOW, VOCAB, SyntheticDataset, recipe

__all__ = ["MODEL", "SHALLOW", "VOCAB", "SyntheticDataset", "recipe"]
