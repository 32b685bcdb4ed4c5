"""`balance_encoders`: the encoders of a model one did not write, balanced from outside.

Before the inner model's forward runs, hook.py describes this rank's media (items.py), gathers the
descriptions of all ranks (table.py), plans, moves the media, encodes this rank's share, and moves
the features back (sharing.py, results.py); the model's own calls of its encoder then return these
features (answers.py). infer.py finds the encoders of a model of transformers, spec.py describes any
other and refuses what cannot be balanced, and proof.py compares the first features with those that
each rank computes itself.
"""
