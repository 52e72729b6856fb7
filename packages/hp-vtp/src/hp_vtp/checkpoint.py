"""Checkpoints that know names and global shapes but no layout: any layout loads any other's.

A checkpoint is a directory of `hp_checkpoint`: a safetensors file per rank and a manifest with
a hash of every part, which is compared when it is read. Every part is written once, however many
copies there are. The directory gets its name when all of it has been written and read back.

Names must not depend on the layout: `layers.3.up`, not `stages.1.up`. A tensor is whole on every
rank that has it, or cut along one dimension over the ranks of its stage in order.
"""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hp_base.dtypes import dtype_name
from hp_base.errors import CheckpointError
from hp_checkpoint import Checkpoint, Part, Source, decode_extra, encode_extra, rename, save
from hp_checkpoint.files import remove_leftovers
from hp_checkpoint.manifest import DTYPES
from hp_platform import all_gather_json
from hp_vtp.topology import PipelineLayout
from hp_vtp.topology.stages import cut

__all__ = [
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
    extra: Mapping[str, object] | None = None,
) -> None:
    """Write a checkpoint; every rank of the layout calls it.

    Args:
        path: Directory that does not exist yet, on a file system that all ranks share.
        tensors: This rank's tensors or parts, by name.
        sharded_dim: Function from a tensor's name to the dimension along which it is cut.
        layout: Pipeline layout of the ranks.
        group: CPU group of all ranks of the layout.
        extra: JSON of the caller, such as the number of steps; that of rank 0 is written.

    Raises:
        CheckpointError: On all ranks, if the path exists, or parts of a name do not fit each other,
            or the storage failed.
        ValueError: If `extra` is not JSON.
    """
    path, text = Path(path), encode_extra(extra or {})
    lengths = {
        name: x.shape[dim] for name, x in tensors.items() if (dim := sharded_dim(name)) is not None
    }
    every = all_gather_json(lengths, of=dict[str, int], group=group)

    def sources() -> dict[str, Source]:
        require_new({path.name} if path.exists() else set())
        path.parent.mkdir(parents=True, exist_ok=True)
        found = {}
        for name, x in tensors.items():
            dim = sharded_dim(name)
            part = _part(name, x.detach(), dim, layout=layout, every=every)
            found[name] = Source.of(part, kind=f"Tensor cut along {dim}")
        return found

    def require_new(taken: set[str]) -> str:
        if path.name in taken:
            raise CheckpointError(f"path ({path}) must not exist")
        return path.name

    save(
        path.parent.resolve(),
        path.name,
        sources,
        commit=lambda staging: rename(staging, require_new),
        group=group,
        extra=text,
    )


def load_checkpoint(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    *,
    sharded_dim: ShardedDim,
    layout: PipelineLayout,
) -> dict[str, object]:
    """Read this rank's tensors or parts into `tensors`. No rank needs another one for that.

    Args:
        path: Directory that `save_checkpoint` wrote, with any layout.
        tensors: Tensors or parts to fill in place, by name.
        sharded_dim: Function from a tensor's name to the dimension along which it is cut here;
            another one may have been saved.
        layout: Pipeline layout of the ranks that load.

    Returns:
        The `extra` of the save.

    Raises:
        CheckpointError: Naming every tensor that is missing or has another shape or type.
    """
    saved = Checkpoint.open(Path(path).resolve())
    extra, known = decode_extra(saved.manifest.extra), saved.manifest.tensors
    me = dist.get_rank()
    rank, ranks = layout.tp_rank_of(me), layout.tp_sizes[layout.stage_of(me)]
    problems = []
    parts: dict[str, Part] = {}
    for name, x in tensors.items():
        if name not in known:
            problems.append(f"{name} must be in the checkpoint")
            continue
        dtype, whole = DTYPES[known[name].dtype], known[name].shape
        shape, offset, dim = list(whole), [0] * len(whole), sharded_dim(name)
        if dim is not None:
            ends = cut(shape[dim], ranks)
            offset[dim], shape[dim] = ends[rank], ends[rank + 1] - ends[rank]
        if list(x.shape) != shape or x.dtype != dtype:
            problems.append(
                f"{name}: {dtype_name(x.dtype)}{list(x.shape)} must equal "
                f"{dtype_name(dtype)}{shape}, the part of rank {rank} of {ranks}"
            )
        else:
            parts[name] = Part(x.detach(), whole, tuple(offset))
    if problems:
        raise CheckpointError(f"{path}: " + "; ".join(problems))
    saved.verify(parts.keys())  # before any of them is changed
    saved.fill(parts)
    return extra


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Return the tensors of an optimizer's state by name: `optimizer/<parameter>/<key>`.

    A tensor of its parameter's shape is cut like the parameter, see `optimizer_dim`.
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
    """Extend a `ShardedDim` of parameters to the names of `optimizer_tensors`.

    Args:
        sharded_dim: Function from the name of a parameter to the dimension along which it is cut,
            None if it is not.
        whole: Keys of state tensors that have another shape than their parameter.
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
        path: Directory of the checkpoint.
        optimizer: Optimizer of these parameters; state that it has is replaced.
        parameters: Parameters of this rank, by name.
        sharded_dim: Function from the name of a parameter, or of its state, to the dimension along
            which it is cut; from `optimizer_dim`.
        layout: Pipeline layout of the ranks that load.

    Raises:
        CheckpointError: As `load_checkpoint`.
    """
    saved = Checkpoint.open(Path(path).resolve())
    state: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        prefix = f"optimizer/{name}/"
        optimizer.state[parameter] = {}
        for full, tensor in saved.manifest.tensors.items():
            key = full.removeprefix(prefix)
            if full.startswith(prefix) and "/" not in key:
                # A number stays on the CPU, as optimizers have it; what is like its parameter not.
                device = parameter.device if tensor.shape else "cpu"
                state[full] = torch.empty(
                    parameter.shape if tensor.shape else (),
                    dtype=DTYPES[tensor.dtype],
                    device=device,
                )
                optimizer.state[parameter][key] = state[full]
    load_checkpoint(path, state, sharded_dim=sharded_dim, layout=layout)


def remove_unfinished(path: str | os.PathLike[str]) -> bool:
    """Remove leftovers of an interrupted save; return whether there were any."""
    path = Path(path)
    staging = re.compile(re.escape(path.name) + r"\.tmp-[0-9a-f]{32}")
    return bool(remove_leftovers(path.parent.resolve(), staging.fullmatch))


def _part(
    name: str,
    x: Tensor,
    dim: int | None,
    *,
    layout: PipelineLayout,
    every: list[dict[str, int]],
) -> Part:
    """Return this rank's part of a tensor, from the lengths on all ranks of its stage."""
    shape, offset = list(x.shape), [0] * x.ndim
    if dim is not None:
        me = dist.get_rank()
        stage, place = layout.stage_of(me), layout.tp_rank_of(me)
        lengths = {
            layout.tp_rank_of(rank): theirs[name]
            for rank, theirs in enumerate(every)
            if name in theirs and layout.stage_of(rank) == stage
        }
        ranks = layout.tp_sizes[stage]
        if sorted(lengths) != list(range(ranks)):
            raise CheckpointError(f"{name}: parts {sorted(lengths)} must be all of 0..{ranks - 1}")
        shape[dim] = sum(lengths.values())
        offset[dim] = sum(lengths[other] for other in range(place))
    return Part(x, tuple(shape), tuple(offset))
