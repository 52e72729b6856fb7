"""Checkpoints that know names and global shapes but no layout: any layout loads any other's.

A checkpoint is a directory: `index.json` says of every tensor its global shape and which file has
which part of it; `rank<N>.pt` has the parts that rank N wrote. Every part is written once, however
many copies there are. The directory gets its name when all of it has been written.

Names must not depend on the layout: `layers.3.up`, not `stages.1.up`. A tensor is whole on every
rank that has it, or cut along one dimension over the ranks of its stage in order.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hp_platform import agree, all_gather_json
from hp_vtp.checkpoint_reader import FORMAT, INDEX, CheckpointError, Reader
from hp_vtp.placement import cut
from hp_vtp.topology import PipelineLayout

__all__ = [
    "CheckpointError",
    "ShardedDim",
    "load_checkpoint",
    "load_optimizer",
    "optimizer_dim",
    "optimizer_tensors",
    "remove_unfinished",
    "save_checkpoint",
]

ShardedDim = Callable[[str], int | None]
"""The dimension along which a tensor of a name is cut over the ranks of a stage, if it is cut."""


def save_checkpoint(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    *,
    sharded_dim: ShardedDim,
    layout: PipelineLayout,
    group: ProcessGroup,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint; every rank of the layout calls it.

    Args:
        path: Directory that does not exist yet, on a file system that all ranks share.
        tensors: This rank's tensors or parts, by name.
        sharded_dim: How each is cut.
        layout: Of the ranks.
        group: CPU group of all ranks of the layout.
        extra: For JSON, such as the number of steps; that of rank 0 is written.

    Raises:
        CheckpointError: If the path exists, or parts of a name do not fit each other; on one rank.
        PeerError: On the other ranks then.
    """
    path, rank = Path(path), dist.get_rank()
    scratch = path.with_name(f".{path.name}.part")
    mine = [
        _Part(name, list(x.shape), str(x.dtype).removeprefix("torch."), sharded_dim(name))
        for name, x in tensors.items()
    ]
    every = all_gather_json(mine, of=list[_Part], group=group)
    error: Exception | None = None
    try:
        index = _make_index(every, layout)
        if path.exists():
            raise CheckpointError(f"path ({path}) must not exist")  # noqa: TRY301 (agreed on below)
        scratch.mkdir(parents=True, exist_ok=True)
        written = {
            name: tensors[name].detach().cpu().contiguous().clone()
            for name, entry in index.items()
            if any(part["file"] == f"rank{rank}.pt" for part in entry["parts"])
        }
        torch.save(written, scratch / f"rank{rank}.pt")
        if rank == 0:
            text = json.dumps({"format": FORMAT, "tensors": index, "extra": dict(extra or {})})
            (scratch / INDEX).write_text(text)
    except Exception as caught:  # noqa: BLE001 - told to all ranks, then raised
        error = caught
    agree(error, group=group, where="the checkpoint is complete")
    try:
        if rank == 0:
            scratch.rename(path)
    except OSError as caught:
        error = caught
    agree(error, group=group, where="the checkpoint has its name")


def load_checkpoint(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    *,
    sharded_dim: ShardedDim,
    layout: PipelineLayout,
) -> dict[str, Any]:
    """Read this rank's tensors or parts into `tensors`. No rank needs another one for that.

    Args:
        path: What `save_checkpoint` wrote, with any layout.
        tensors: To be filled, by name.
        sharded_dim: How each is cut here, which need not be how it was cut there.
        layout: Of the ranks here.

    Returns:
        What was given as `extra`.

    Raises:
        CheckpointError: Naming every tensor that is missing or has another shape or type.
    """
    reader = Reader(Path(path))
    me = dist.get_rank()
    rank, ranks = layout.tp_rank_of(me), layout.tp_sizes[layout.stage_of(me)]
    problems = []
    ranges: dict[str, tuple[int, int]] = {}
    for name, x in tensors.items():
        entry = reader.index.get(name)
        if entry is None:
            problems.append(f"{name} must be in the checkpoint")
            continue
        shape, dim = list(entry["shape"]), sharded_dim(name)
        if dim is not None:
            ends = cut(shape[dim], ranks)
            ranges[name] = ends[rank], ends[rank + 1]
            shape[dim] = ends[rank + 1] - ends[rank]
        dtype = str(x.dtype).removeprefix("torch.")
        if list(x.shape) != shape or dtype != entry["dtype"]:
            problems.append(
                f"{name}: {dtype}{list(x.shape)} must equal {entry['dtype']}{shape}, the part of "
                f"rank {rank} of {ranks}"
            )
    if problems:
        raise CheckpointError(f"{path}: " + "; ".join(problems))
    with torch.no_grad():
        for name, x in tensors.items():
            reader.fill(x, name, dim=sharded_dim(name), wanted=ranges.get(name))
    return reader.extra


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """The state of an optimizer by name: `optimizer/<parameter>/<key>`; tensors only.

    What has the shape of its parameter is cut like it, see `optimizer_dim`.
    """
    return {
        f"optimizer/{name}/{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def optimizer_dim(
    sharded_dim: ShardedDim, *, whole: frozenset[str] = frozenset({"step"})
) -> ShardedDim:
    """Extend what says how parameters are cut to the names of `optimizer_tensors`.

    Args:
        sharded_dim: Of parameters.
        whole: Keys of the state that are not of their parameter's shape.
    """

    def dim(name: str) -> int | None:
        if not name.startswith("optimizer/"):
            return sharded_dim(name)
        parameter, _, key = name.removeprefix("optimizer/").rpartition("/")
        return None if key in whole else sharded_dim(parameter)

    return dim


def load_optimizer(
    path: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    *,
    sharded_dim: ShardedDim,
    layout: PipelineLayout,
) -> None:
    """Give a new optimizer the state that `optimizer_tensors` made for a checkpoint.

    Args:
        path: Of the checkpoint.
        optimizer: Of these parameters; state that it has is replaced.
        parameters: This rank's, by name.
        sharded_dim: Of parameters and state; from `optimizer_dim`.
        layout: Of the ranks here.

    Raises:
        CheckpointError: As `load_checkpoint`.
    """
    reader = Reader(Path(path))
    state: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        prefix = f"optimizer/{name}/"
        optimizer.state[parameter] = {}
        for full, entry in reader.index.items():
            if full.startswith(prefix) and "/" not in full.removeprefix(prefix):
                dtype = getattr(torch, entry["dtype"])
                # A number stays on the CPU, as optimizers have it; what is like its parameter not.
                is_like = bool(entry["shape"])
                shape = parameter.shape if is_like else ()
                x = torch.empty(shape, dtype=dtype, device=parameter.device if is_like else "cpu")
                state[full] = x
                optimizer.state[parameter][full.removeprefix(prefix)] = x
    load_checkpoint(path, state, sharded_dim=sharded_dim, layout=layout)


def remove_unfinished(path: str | os.PathLike[str]) -> bool:
    """Remove what a save that was interrupted has left; return whether there was any."""
    path = Path(path)
    scratch = path.with_name(f".{path.name}.part")
    found = scratch.exists()
    if found:
        shutil.rmtree(scratch)
    return found


class _Part(NamedTuple):
    """What a rank has of a tensor, and the dimension along which it is cut, if it is."""

    name: str
    shape: list[int]
    dtype: str
    dim: int | None


def _make_index(every: list[list[_Part]], layout: PipelineLayout) -> dict[str, dict[str, Any]]:
    """What is in the checkpoint and who writes it: of copies the lowest rank."""
    holders: dict[str, dict[int, tuple[int, Any]]] = {}
    for rank, entries in enumerate(every):
        for entry in entries:
            place = 0 if entry[3] is None else layout.tp_rank_of(rank)
            ranks = 1 if entry[3] is None else layout.tp_sizes[layout.stage_of(rank)]
            holders.setdefault(entry[0], {}).setdefault(place, (rank, (ranks, *entry[1:])))
    index = {}
    for name, parts in sorted(holders.items()):
        ranks, shape, dtype, dim = parts[min(parts)][1]
        if sorted(parts) != list(range(ranks)):
            raise CheckpointError(f"{name}: parts {sorted(parts)} must be all of 0..{ranks - 1}")
        shape, start, listed = list(shape), 0, []
        for place in range(ranks):
            rank, (_, local, other_dtype, other_dim) = parts[place]
            if (other_dtype, other_dim) != (dtype, dim) or _rest(local, dim) != _rest(shape, dim):
                raise CheckpointError(
                    f"{name}: part {place} ({other_dtype}{local}, cut along {other_dim}) must fit "
                    f"part 0 ({dtype}{shape}, cut along {dim})"
                )
            length = local[dim] if dim is not None else 0
            listed.append({"file": f"rank{rank}.pt", "start": start, "stop": start + length})
            start += length
        if dim is not None:
            shape[dim] = start
        index[name] = {"shape": shape, "dtype": dtype, "dim": dim, "parts": listed}
    return index


def _rest(shape: list[int], dim: int | None) -> list[int]:
    """What all parts of a tensor have in common."""
    return shape if dim is None else shape[:dim] + shape[dim + 1 :]
