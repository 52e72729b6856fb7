"""The first weights of a job: written by the reference, found and perhaps taken by the other.

A file has the values of one rank's parts of one model, end to end, and where each is; neither who
writes nor who reads has a copy of them in memory.
"""

import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from hp_base.dtypes import dtype_name
from hp_verify.recording.events import Box
from hp_verify.recording.slices import Flat, Slice, index_of, placed, sizes_of, whole

FIRST = "first weights"
_ALIGNED = 64


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    """A part of a weight in a file.

    Attributes:
        name: The weight.
        dtype: Its dtype, without ``torch.``.
        shape: Shape of the whole.
        box: Where the part is in it.
        at: Its first byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    at: int


def keep_weights(folder: Path, rank: int, root: int, weights: Mapping[str, Tensor | Flat]) -> None:
    """Write a rank's parts of weights.

    Args:
        folder: The same for all ranks, and for all root modules of a rank.
        rank: Rank of this process.
        root: Which of its root modules, in the order in which they were called.
        weights: Name -> weight.
    """
    place = folder / FIRST
    place.mkdir(exist_ok=True)
    path = place / f"root-{root:04d}-{rank:05d}.bin"
    kept: list[_Kept] = []
    with path.open("wb") as file:
        for name, weight in weights.items():
            local, parts, shape = placed(weight)
            for part in parts:
                values = part.of(local).contiguous().reshape(-1)
                file.write(bytes(-file.tell() % _ALIGNED))
                dtype = dtype_name(values.dtype)
                kept.append(_Kept(name, dtype, shape, part.box, file.tell()))
                file.write(values.cpu().view(torch.uint8).numpy().data)
    path.with_suffix(".json").write_bytes(msgspec.json.encode(kept))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Put together what `keep_weights` of all ranks has written; name -> whole weight."""
    found: dict[str, Tensor] = {}
    for index in sorted((folder / FIRST).glob("root-*.json")):
        for kept, values in _read(index):
            if kept.box == whole(kept.shape):
                found[kept.name] = values
                continue
            if kept.name not in found:
                found[kept.name] = values.new_zeros(kept.shape)
            found[kept.name][index_of(kept.box)] = values
    return found


def _read(index: Path) -> Iterator[tuple[_Kept, Tensor]]:
    """Yield what a file has; values are read from it when they are looked at."""
    kept = msgspec.json.decode(index.read_bytes(), type=list[_Kept])
    with index.with_suffix(".bin").open("rb") as file:
        size = file.seek(0, 2)
        data = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else bytearray()
    for part in kept:
        sizes = sizes_of(part.box)
        dtype: torch.dtype = getattr(torch, part.dtype)
        count = torch.Size(sizes).numel()
        flat = torch.frombuffer(data, dtype=dtype, count=count, offset=part.at) if count else None
        yield part, torch.empty(sizes, dtype=dtype) if flat is None else flat.view(sizes)


@torch.no_grad()
def take_weights(
    tensors: Iterable[tuple[Tensor, Sequence[Slice]]], weights: Mapping[str, Tensor]
) -> None:
    """Give tensors the reference's values.

    Args:
        tensors: Each, changed in place, with what it is of the reference.
        weights: Name -> whole weight of the reference.
    """
    for tensor, slices in tensors:
        local, _, _ = placed(tensor)
        for part in slices:
            theirs = weights[part.name][index_of(part.box)]
            part.of(local).copy_(theirs)
