"""What a checkpoint has, and reading parts of it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hp_checkpoint import Checkpoint, Part, decode_extra
from hp_checkpoint.manifest import DTYPES


class Saved(NamedTuple):
    """A checkpoint.

    Attributes:
        tensors: Dtype and shape of each, by name.
        extra: What was saved beside them.
        fill: Reads parts of tensors, by name, in place.
    """

    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    extra: dict[str, Any]
    fill: Callable[[Mapping[str, Part]], None]


def open_saved(path: Path) -> Saved:
    """Read what a checkpoint says of itself.

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
