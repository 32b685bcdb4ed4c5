"""Examples made from their index alone, on which the doctor's self-test trains, too."""

from orchmllm.tools.doctor.synthetic import MODEL, VOCAB, SyntheticDataset, recipe
from tests.lib.drawn import model_of

__all__ = ["MODEL", "SHALLOW", "VOCAB", "SyntheticDataset", "recipe"]
SHALLOW = model_of(num_layers=1)
