"""Dtypes by the names that a config gives them."""

BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
"""Bytes of a number in each `train.dtype`."""
