"""The state of random number generators: seeded alike, and told apart."""

import array
import hashlib
import random
import sys
from contextlib import suppress
from typing import Any

import torch

TORCH, NUMPY, PYTHON, CUDA = "torch", "numpy", "python", "cuda"
_SEEDS = 1 << 32
"""numpy takes smaller ones."""


def seed(value: int) -> None:
    """Seed the generators of torch, python and, where it is installed, numpy."""
    torch.manual_seed(value)
    random.seed(value)
    with suppress(ImportError):
        import numpy as np  # noqa: PLC0415 - not everybody has it

        np.random.seed(value % _SEEDS)  # noqa: NPY002 - the one that jobs use unseen


def states() -> dict[str, str]:
    """Name each generator's state: generator -> the same text for the same state."""
    found = {TORCH: _text(torch.get_rng_state().numpy().tobytes())}
    found[PYTHON] = _text(array.array("Q", random.getstate()[1]).tobytes())
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, position, *_ = numpy.random.get_state()
        found[NUMPY] = _text(keys.tobytes() + bytes(str(position), "ascii"))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found[CUDA] = _text(torch.cuda.get_rng_state().numpy().tobytes())
    return found


def _text(state: bytes) -> str:
    return hashlib.blake2b(state, digest_size=8).hexdigest()
