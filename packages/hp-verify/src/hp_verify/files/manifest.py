"""A manifest of tensors: what an engine holds, as names, shapes, dtypes and digests, in JSON."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from hp_base.errors import CheckpointError
from hp_base.folder import read_named, why_not
from hp_checkpoint.manifest import DTYPES

_FORMAT = "hp-tensors"
_MOST_BYTES = 1 << 30


class Listed(msgspec.Struct, frozen=True):
    """A tensor.

    Attributes:
        dtype: Its dtype as safetensors calls it, such as `"BF16"`.
        shape: Its shape.
        sha256: SHA of its bytes, little-endian, in C order; hexadecimal.
    """

    dtype: str
    shape: tuple[int, ...]
    sha256: str


class _Manifest(msgspec.Struct, frozen=True):
    format: str
    tensors: dict[str, Listed]


def digest(values: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes in C order."""
    flat = values.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()


def write_listing(path: Path, tensors: Mapping[str, Listed]) -> None:
    """Write a new manifest.

    Raises:
        CheckpointError: When it cannot be, or is there.
    """
    text = msgspec.json.format(msgspec.json.encode(_Manifest(_FORMAT, dict(tensors))), indent=1)
    try:
        with path.open("xb") as file:
            file.write(text + b"\n")
    except OSError as error:
        raise CheckpointError(f"{path} must be a new file: {error.strerror}") from None


def read_listing(path: Path) -> dict[str, Listed]:
    """Read a manifest.

    Raises:
        CheckpointError: When it is none.
    """
    try:
        found = msgspec.json.decode(read_named(path, limit=_MOST_BYTES), type=_Manifest)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} must be a manifest of tensors: {why_not(error)}") from None
    unknown = sorted({tensor.dtype for tensor in found.tensors.values()} - DTYPES.keys())
    if found.format != _FORMAT or unknown:
        wrong = f"dtype {unknown[0]}" if unknown else f"format {found.format[:40]}"
        raise CheckpointError(f"{path} must be a manifest of tensors: {wrong} is not known")
    return found.tensors
