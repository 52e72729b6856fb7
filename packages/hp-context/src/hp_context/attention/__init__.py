"""Attention over the keys of a rank: by torch, by blocks, by parts that are merged."""
