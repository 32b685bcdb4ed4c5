"""Schemes of other systems on the same lengths: pipelines, groupings, comparisons; no torch."""
