"""Decisions before a run: units, splits and recomputation of modules; no torch."""
