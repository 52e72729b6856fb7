"""Process groups that stay distinct, and what can stand for one.

Note [A group of its own]. `DeviceMesh` gives a mesh axis that spans the world the default group, so
expert, context, data-parallel and control traffic would share one queue and one sequence of
collectives as soon as an axis has that size. `new_group` therefore always makes a communicator of
its own, and `mesh_of` builds a mesh over such groups.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import chain, count, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hp_platform import _internals
from hp_platform.membership import SECRET_DIGITS, new_secret, require_members

_serial = count()  # how many times this process called new_group: the global order of construction


def new_group(
    rank_lists: Sequence[Sequence[int]],
    *,
    name: str,
    backend: str | None = None,
    timeout: timedelta | None = None,
    high_priority: bool = False,
) -> ProcessGroup | None:
    """Create one connected process group per list of ranks; return the one of this rank.

    Every rank of the default group must call this with the same arguments and in the same order
    as its other calls, members or not. The communicators are new even where the ranks coincide
    with those of another group (Note [A group of its own]).

    Args:
        rank_lists: Disjoint, ascending lists of global ranks. Ranks may be left out.
        name: What the group is for, such as `"ep"`; shown in torch's logs.
        backend: `"gloo"` or `"nccl"`; by default that of the default group.
        timeout: Of each collective; by default that of the default group.
        high_priority: Run NCCL kernels of this group on a high-priority stream.

    Returns:
        The group that contains this rank, or None.

    Raises:
        ValueError: If the lists are not disjoint, ascending and inside the world, or differ from
            those that rank 0 passed in its call of the same number.
        RuntimeError: If the default process group is not initialised.
    """
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("the default process group must be initialised before new_group")
    _validate(rank_lists, world_size=world.size())
    backend = backend or str(dist.get_backend(world))
    secret = secret_of_call(name, rank_lists, backend, rank=world.rank())
    on_cuda = _serves_cuda(backend)
    if timeout is None:
        timeout = _internals.group_timeout(world, _device(on_cuda=_serves_cuda_now(world)))
    options = None
    if on_cuda:
        options = _internals.nccl_options(high_priority=high_priority, timeout=timeout)
    mine: ProcessGroup | None = None
    with (
        _unbound(world) if not on_cuda else nullcontext(),
        _internals.on_gloo_devices_of(world),
    ):
        for ranks in rank_lists:
            group = dist.new_group(
                list(ranks), timeout=timeout, backend=backend, pg_options=options, group_desc=name
            )
            if world.rank() in ranks:
                mine = group
    if mine is not None:
        require_members(mine, secret=secret, name=name)
    if mine is not None and on_cuda:
        # NCCL may otherwise connect at the first use, and ranks may differ in which group that is.
        dist.all_reduce(torch.zeros(1, device=_device(on_cuda=True)), group=mine)
        torch.cuda.synchronize()
    return mine


def resolve_group(mesh_or_group: DeviceMesh | ProcessGroup) -> ProcessGroup:
    """Return the process group that a one-dimensional mesh or a group stands for.

    Raises:
        ValueError: If a mesh has more than one axis.
        TypeError: If it is neither.
    """
    if isinstance(mesh_or_group, ProcessGroup):
        return mesh_or_group
    if not isinstance(mesh_or_group, DeviceMesh):
        kind = type(mesh_or_group).__name__
        raise TypeError(f"mesh_or_group ({kind}) must be a DeviceMesh or a ProcessGroup")
    if mesh_or_group.ndim != 1:
        axes = mesh_or_group.mesh_dim_names
        raise ValueError(
            f"mesh.ndim ({mesh_or_group.ndim}) must equal 1: select one axis of {axes} first"
        )
    return mesh_or_group.get_group()


def mesh_of(
    group_by_axis: Mapping[str, ProcessGroup], ranks: Sequence[Any], *, device_type: str
) -> DeviceMesh:
    """Build a `DeviceMesh` whose axes are existing groups.

    Args:
        group_by_axis: Name of each axis and the group of this rank along it, outermost first.
        ranks: Global ranks, nested as deep as there are axes.
        device_type: `"cpu"` or `"cuda"`.

    Raises:
        ValueError: If `ranks` is not nested as deep as there are axes, or the ranks along an axis
            are not those of its group.
    """
    mesh = torch.tensor(ranks, dtype=torch.int, device="cpu")
    axes = tuple(group_by_axis)
    if mesh.ndim != len(axes):
        raise ValueError(f"depth of ranks ({mesh.ndim}) must equal the number of axes ({axes})")
    _require_own_ranks(group_by_axis, mesh)
    groups = list(group_by_axis.values())
    return DeviceMesh.from_group(
        groups[0] if len(groups) == 1 else groups,
        device_type,
        mesh=mesh,
        mesh_dim_names=axes,
    )


def global_ranks(group: ProcessGroup) -> list[int]:
    """Global rank of each rank of `group`; the group's own ranks if it has no default group."""
    if _internals.knows_ranks(group):
        return dist.get_process_group_ranks(group)
    return list(range(group.size()))


def _validate(rank_lists: Sequence[Sequence[int]], *, world_size: int) -> None:
    ranks = list(chain.from_iterable(rank_lists))
    if not rank_lists or not all(rank_lists):
        raise ValueError(f"rank_lists ({list(rank_lists)}) must be a non-empty list of such lists")
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"rank_lists ({list(rank_lists)}) must be disjoint")
    if not all(0 <= rank < world_size for rank in ranks):
        raise ValueError(
            f"rank_lists ({list(rank_lists)}) must lie inside the world ({world_size} ranks)"
        )
    if any(a > b for part in rank_lists for a, b in pairwise(part)):
        raise ValueError(f"rank_lists ({list(rank_lists)}) must be ascending")


def secret_of_call(
    name: str, rank_lists: Sequence[Sequence[int]], backend: str, *, rank: int
) -> str:
    """Compare this call with that of rank 0: a wrong order would otherwise end in a hang.

    Returns:
        A secret that rank 0 has made up for it.

    Raises:
        ValueError: If the calls differ.
    """
    serial = next(_serial)
    mine = f"{name} {[list(part) for part in rank_lists]} {backend}"
    store = _internals.default_store()
    key = f"hp_platform/new_group/{serial}"
    call = mine[:200] + hashlib.sha256(mine.encode()).hexdigest()
    if rank == 0:
        secret = new_secret()
        store.set(key, call + secret)
        return secret
    told = store.get(key).decode()
    theirs, secret = told[:-SECRET_DIGITS], told[-SECRET_DIGITS:]
    if theirs != call:
        raise ValueError(
            f"rank {rank}: new_group call {serial} ({mine[:200]}) must equal that of rank 0 "
            f"({theirs[:-64]}): every rank makes every group in one order"
        )
    return secret


def _serves_cuda(backend: str) -> bool:
    """Whether NCCL is part of a backend as `torch.distributed.new_group` takes it."""
    if backend == "undefined":  # what torch calls its own choice: NCCL where there is a GPU
        return torch.cuda.is_available()
    return "nccl" in backend


def _serves_cuda_now(world: ProcessGroup) -> bool:
    return _serves_cuda(str(dist.get_backend(world)))


def _device(*, on_cuda: bool) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")


@contextmanager
def _unbound(world: ProcessGroup) -> Iterator[None]:
    """Hide the device of the default group while Gloo groups are made.

    Otherwise torch takes part, on the ranks outside a new group alone, in splitting the default
    NCCL communicator, for which they would wait forever.
    """
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


def _require_own_ranks(group_by_axis: Mapping[str, ProcessGroup], mesh: torch.Tensor) -> None:
    world = dist.group.WORLD
    rank = 0 if world is None else world.rank()
    at = (mesh == rank).nonzero()
    if len(at) != 1:
        raise ValueError(f"ranks ({mesh.tolist()}) must contain rank {rank} once")
    position = at[0].tolist()
    for axis, (name, group) in enumerate(group_by_axis.items()):
        index: list[Any] = list(position)
        index[axis] = slice(None)
        along = mesh[tuple(index)].tolist()
        if along != global_ranks(group):
            raise ValueError(
                f"ranks along axis {name} ({along}) must equal those of its group "
                f"({global_ranks(group)})"
            )
