"""The proof, before a run, that a model of transformers computes in packed rows with planned
encoders what transformers computes example by example."""
