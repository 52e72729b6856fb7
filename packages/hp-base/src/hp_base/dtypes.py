"""Dtypes by their names in a config."""

BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
"""Bytes of a number in each `train.dtype`."""


def dtype_name(dtype: object) -> str:
    """Return the name of one of torch's dtypes, without ``torch.``."""
    return str(dtype).removeprefix("torch.")
