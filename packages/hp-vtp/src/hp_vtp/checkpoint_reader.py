"""Read parts of the tensors of a checkpoint, however they were cut when it was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

INDEX = "index.json"
FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint cannot be written, or does not have what is asked of it."""


class Reader:
    """Reads parts of tensors; opens each file once, and maps it instead of reading it whole."""

    def __init__(self, path: Path) -> None:
        """Read the index.

        Raises:
            CheckpointError: If there is none, or it is of another format.
        """
        try:
            content = json.loads((path / INDEX).read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"path ({path}) must be a complete checkpoint: {error}"
            ) from error
        if content.get("format") != FORMAT:
            raise CheckpointError(f"{path}: format ({content.get('format')}) must be {FORMAT}")
        self.index: dict[str, dict[str, Any]] = content["tensors"]
        self.extra: dict[str, Any] = content["extra"]
        self._path = path
        self._files: dict[str, dict[str, Tensor]] = {}

    def fill(
        self, x: Tensor, name: str, *, dim: int | None, wanted: tuple[int, int] | None
    ) -> None:
        """Copy a tensor, or the range `wanted` along `dim`, into `x`."""
        entry = self.index[name]
        saved = entry["dim"]
        for part in entry["parts"]:
            piece, target = self._open(part["file"])[name], x
            if saved is None:
                if dim is not None and wanted is not None:
                    piece = piece.narrow(dim, wanted[0], wanted[1] - wanted[0])
                target.copy_(piece)
                continue
            start, stop = part["start"], part["stop"]
            if dim is None or wanted is None:
                target = x.narrow(saved, start, stop - start)
            elif dim == saved:
                first, last = max(start, wanted[0]), min(stop, wanted[1])
                if first >= last:
                    continue
                piece = piece.narrow(dim, first - start, last - first)
                target = x.narrow(dim, first - wanted[0], last - first)
            else:
                piece = piece.narrow(dim, wanted[0], wanted[1] - wanted[0])
                target = x.narrow(saved, start, stop - start)
            target.copy_(piece)

    def _open(self, file: str) -> dict[str, Tensor]:
        if file not in self._files:
            try:
                loaded = torch.load(self._path / file, mmap=True, weights_only=True)
            except (OSError, RuntimeError) as error:
                raise CheckpointError(f"{self._path / file} must be readable: {error}") from error
            self._files[file] = loaded
        return self._files[file]
