"""The first weights of a job: written by the reference, found and perhaps taken by the other."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hp_platform.testing import Part, Recorder
from hp_platform.testing.recording import read_steps
from hp_train.jobs.slices import Flat, Slice, index_of, placed

FIRST = "first weights"


def keep_weights(folder: Path, rank: int, root: int, weights: Mapping[str, Tensor | Flat]) -> None:
    """Write a rank's parts of weights.

    Args:
        folder: The same for all ranks, and for all root modules of a rank.
        rank: Rank of this process.
        root: Which of its root modules, in the order in which they were called.
        weights: Name -> weight.
    """
    recorder = Recorder(folder / FIRST / f"root-{root:04d}", rank=rank)
    for name, weight in weights.items():
        local, parts, shape = placed(weight)
        for part in parts:
            offset = tuple(begin for begin, _ in part.box)
            recorder.add("weight", {name: Part(part.of(local), shape, offset)})
    recorder.end_step()


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Put together what `keep_weights` of all ranks has written; name -> whole weight."""
    found: dict[str, Tensor] = {}
    for root in sorted((folder / FIRST).glob("root-*")):
        for step in read_steps(root):
            found |= step.tensors["weight"]
    return found


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
