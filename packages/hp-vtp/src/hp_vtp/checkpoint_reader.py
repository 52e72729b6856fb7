"""What a checkpoint has, whichever version wrote it, and reading parts of it."""

import json
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hp_platform.store import Box, Checkpoint, CheckpointError, Part, decode_extra
from hp_platform.store.manifest import DTYPES, MANIFEST

_OLD_INDEX, _OLD_FORMAT = "index.json", 1


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
    if not os.path.lexists(path / MANIFEST):
        return _open_old(path)
    checkpoint = Checkpoint.open(path.resolve())
    tensors = {
        name: (DTYPES[tensor.dtype], tensor.shape)
        for name, tensor in checkpoint.manifest.tensors.items()
    }

    def fill(parts: Mapping[str, Part]) -> None:
        checkpoint.verify(parts.keys())  # before any of them is changed
        checkpoint.fill(parts)

    return Saved(tensors, decode_extra(checkpoint.manifest.extra), fill)


def _open_old(path: Path) -> Saved:
    """What version 0.1.0 wrote: an index, and a file of torch for each rank, without hashes."""
    try:
        content = json.loads((path / _OLD_INDEX).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"path ({path}) must be a complete checkpoint: {error}") from error
    if content.get("format") != _OLD_FORMAT:
        raise CheckpointError(f"{path}: format ({content.get('format')}) must be {_OLD_FORMAT}")
    index: dict[str, dict[str, Any]] = content["tensors"]

    @cache
    def opened(file: str) -> dict[str, Tensor]:
        try:
            found: dict[str, Tensor] = torch.load(path / file, mmap=True, weights_only=True)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{path / file} must be readable: {error}") from error
        return found

    def fill(parts: Mapping[str, Part]) -> None:
        for name, part in parts.items():
            for saved in index[name]["parts"]:
                box = _old_box(index[name], saved)
                if both := part.box.overlap(box):
                    values = opened(saved["file"])[name]
                    part.local[both.within(part.box)] = values[both.within(box)]

    tensors = {
        name: (getattr(torch, entry["dtype"]), tuple(entry["shape"]))
        for name, entry in index.items()
    }
    return Saved(tensors, content["extra"], fill)


def _old_box(entry: Mapping[str, Any], saved: Mapping[str, Any]) -> Box:
    sizes, offsets, dim = list(entry["shape"]), [0] * len(entry["shape"]), entry["dim"]
    if dim is not None:
        offsets[dim], sizes[dim] = saved["start"], saved["stop"] - saved["start"]
    return Box(tuple(offsets), tuple(sizes))
