"""Attention over what a rank has: by torch, by blocks, by parts that are merged."""
