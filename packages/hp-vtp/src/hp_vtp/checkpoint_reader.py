"""What a checkpoint has, and reading parts of it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from hp_checkpoint import Checkpoint, Part, decode_extra
from hp_checkpoint.manifest import DTYPES


class Saved(NamedTuple):
    """A checkpoint that is open for reading.

    Attributes:
        tensors: Dtype and shape of each, by name.
        extra: JSON that was saved beside them.
        fill: Function that reads parts of tensors, by name, in place.
    """

    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    extra: dict[str, object]
    fill: Callable[[Mapping[str, Part]], None]


def open_saved(path: Path) -> Saved:
    """Open a checkpoint and read its manifest.

    Raises:
        CheckpointError: If there is none, or it is damaged or of another format.
    """
    checkpoint = Checkpoint.open(path.resolve())
    tensors = {
        name: (DTYPES[tensor.dtype], tensor.shape)
        for name, tensor in checkpoint.manifest.tensors.items()
    }

    def fill(parts: Mapping[str, Part]) -> None:
        checkpoint.verify(parts.keys())  # before any of them is changed
        checkpoint.fill(parts)

    return Saved(tensors, decode_extra(checkpoint.manifest.extra), fill)
