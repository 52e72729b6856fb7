"""Comparisons of files: checkpoints, weights in an engine, curves of losses."""
