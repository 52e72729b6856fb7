"""Process groups, each a communicator of its own, and meshes over them.

All ranks prove that they make the same group. Ranks that make groups in different orders would
hang.

Gloo does not authenticate connections. It accepts the first process that sends a number, which can
be guessed, as the rank that it waits for, and any user of a machine can connect to a port of its
loopback interface. So every rank proves to every other rank, through the group itself, that it has
read a secret in the store of the default group. A stranger fails the proof: the message of the real
rank waits at another connection, and the exchange fails or times out.

The proof is as safe as the store: only this user can read a store in a file, but any process that
can connect to a store on a port can read that store.
"""

import hashlib
import hmac
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hp_platform import _internals

_SECRET_DIGITS = 64
_calls: Counter[tuple[int, ...]] = Counter()
"""Number of calls in which this process has taken part, by the ranks of the calls."""


class Call(NamedTuple):
    """Call that several ranks make together.

    Attributes:
        key: Key of the call in the store, the same on all its ranks and different for other calls.
        secret: Random secret from the first of the ranks.
    """

    key: str
    secret: str


def agree_on_call(what: str, ranks: Sequence[int]) -> Call:
    """Check that all ranks make the same call, by comparing with the call of the first rank.

    Args:
        what: All arguments as a text, which must be the same on all ranks.
        ranks: Global ranks that make the call, this rank among them.

    Raises:
        ValueError: If the calls differ.
    """
    rank, everyone = dist.get_rank(), tuple(ranks)
    number = _calls[everyone]
    _calls[everyone] += 1
    who = "all"
    if everyone != tuple(range(dist.get_world_size())):
        who = hashlib.sha256(str(everyone).encode()).hexdigest()[:16]
    key = f"hp_platform/new_group/{who}/{number}"
    store = _internals.default_store()
    call = what[:200] + hashlib.sha256(what.encode()).hexdigest()
    if rank == everyone[0]:
        secret = new_secret()
        store.set(key, call + secret)
        return Call(key, secret)
    text = store.get(key).decode()
    theirs, secret = text[:-_SECRET_DIGITS], text[-_SECRET_DIGITS:]
    if theirs != call:
        raise ValueError(
            f"rank {rank}: new_group call {number} ({what[:200]}) must equal that of rank "
            f"{everyone[0]} ({theirs[:-64]}): every rank makes every group in one order"
        )
    return Call(key, secret)


def new_secret() -> str:
    """Return a random secret for readers of the store: `_SECRET_DIGITS` hexadecimal digits."""
    return secrets.token_hex(_SECRET_DIGITS // 2)


def require_members(group: ProcessGroup, *, secret: str, name: str) -> None:
    """Refuse a Gloo group to which another process has connected in place of a rank.

    Every rank of the group calls this. Groups of NCCL are not checked: its id contains a secret.

    Args:
        group: New process group.
        secret: Secret that all ranks of the default group share.
        name: Name of the group, for the message.

    Raises:
        RuntimeError: If the proof of a member is wrong.
    """
    if group.size() == 1 or _internals.backend_name(group, torch.device("cpu")) != "gloo":
        return
    me, ranks = group.rank(), dist.get_process_group_ranks(group)
    shown = torch.cat([_proof(secret, ranks, me, other) for other in range(len(ranks))])
    seen = torch.empty_like(shown)
    # An all-to-all uses the connections of all pairs; a gather would use a ring only.
    dist.all_to_all_single(seen, shown, group=group)
    for other, proof in enumerate(seen.chunk(len(ranks))):
        if not torch.equal(proof, _proof(secret, ranks, other, me)):
            raise RuntimeError(
                f"rank {ranks[me]}: a stranger has connected as rank {ranks[other]} of the group "
                f"{name}: another user of this machine or network interferes with this run"
            )


def _proof(secret: str, ranks: list[int], sender: int, receiver: int) -> Tensor:
    text = f"{ranks} {sender} {receiver}".encode()
    digest = bytearray(hmac.digest(bytes.fromhex(secret), text, "sha256"))
    return torch.frombuffer(digest, dtype=torch.uint8)


def new_group(
    rank_lists: Sequence[Sequence[int]],
    *,
    name: str,
    backend: str | None = None,
    timeout: timedelta | None = None,
    high_priority: bool = False,
) -> ProcessGroup | None:
    """Create a connected process group for each list of ranks; return the group of this rank.

    Every rank of the default group, member or not, must call this with the same arguments and in
    the same order among its calls. The communicators are new even if another group has the same
    ranks.

    `DeviceMesh` uses the default group for a mesh axis that spans the world. Expert, context,
    data-parallel and control traffic would then share one queue and one sequence of collectives. So
    `new_group` always makes a new communicator, and `mesh_of` builds a mesh over such groups.

    Args:
        rank_lists: Disjoint, ascending lists of global ranks. Ranks may be left out.
        name: Purpose of the group, such as `"ep"`; shown in torch's logs.
        backend: `"gloo"` or `"nccl"`; default: the backend of the default group.
        timeout: Time-out of each collective; default: the time-out of the default group.
        high_priority: Run NCCL kernels of this group on a high-priority stream.

    Returns:
        The group that contains this rank, or None.

    Raises:
        ValueError: If the lists are not disjoint, ascending and inside the world, or differ from
            the lists that rank 0 passed in its call of the same number.
        RuntimeError: If the default process group is not initialised.
    """
    kind = _Kind.of(backend, timeout, high_priority=high_priority)
    return _make_groups({name: rank_lists}, kind).get(name)


def new_groups(
    rank_lists: Mapping[str, Sequence[Sequence[int]]],
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> dict[str, ProcessGroup]:
    """Create the groups of several purposes in as few calls of torch as their ranks allow.

    Groups of different purposes without a common rank are made together, such as the groups of
    every other edge of a pipeline. Every rank of the default group must call this.

    NCCL makes all parts of a partition in one collective of the whole world (`split_group`). A call
    of torch's `new_group` for each part would take one collective for each: over a thousand at 256
    ranks. Without a communicator to split, as with Gloo, each rank makes only the group that
    contains it. Since torch 2.11 the colour of a part is its lowest rank (pytorch pull request
    173687, listed in its release notes); before, it was a hash, which two parts may share: the
    author names ranks 1474 and 1475, 1984 and 1985.

    Args:
        rank_lists: Name -> rank lists, as in `new_group`. Lists of different names may overlap.
        backend: Backend, as in `new_group`.
        timeout: Time-out, as in `new_group`.

    Returns:
        The groups that contain this rank, by name.

    Raises:
        ValueError: As in `new_group`.
        RuntimeError: If the default process group is not initialised.
    """
    return _make_groups(rank_lists, _Kind.of(backend, timeout)) if rank_lists else {}


def new_group_of_members(
    ranks: Sequence[int], *, name: str, backend: str | None = None
) -> ProcessGroup:
    """Create a connected process group by calls of its members alone.

    Use it while other ranks do other work. Every member calls this, in the same order among its
    calls with the same ranks.

    Args:
        ranks: Ascending global ranks of the members, this rank among them.
        name: Purpose of the group, as in `new_group`.
        backend: Backend, as in `new_group`.

    Raises:
        ValueError: If the ranks are not ascending and inside the world, or the arguments differ
            from the arguments of the first rank.
        RuntimeError: If the default process group is not initialised.
    """
    kind = _Kind.of(backend, None)
    _validate([ranks], world_size=kind.world.size())
    call = agree_on_call(f"{name} {list(ranks)} {kind.backend}", ranks)
    group = _make_alone(ranks, f"{call.key}/{name}", kind, name=name)
    assert group is not None, "a rank that is not among them does not call this"
    return _finish(group, call, kind, name=name)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Properties that groups which are made together share."""

    world: ProcessGroup
    backend: str
    timeout: timedelta | None
    high_priority: bool

    @classmethod
    def of(
        cls, backend: str | None, timeout: timedelta | None, *, high_priority: bool = False
    ) -> "_Kind":
        world = dist.group.WORLD
        if world is None:
            raise RuntimeError("the default process group must be initialised before new_group")
        world_backend = str(dist.get_backend(world))
        if timeout is None:
            timeout = _internals.group_timeout(world, _device(on_cuda=_serves_cuda(world_backend)))
        return cls(world, backend or world_backend, timeout, high_priority)

    @property
    def on_cuda(self) -> bool:
        return _serves_cuda(self.backend)

    def options(self) -> object:
        """Return options for one group, which writes into them."""
        if not self.on_cuda:
            return None
        return _internals.nccl_options(high_priority=self.high_priority, timeout=self.timeout)


def _make_groups(
    rank_lists: Mapping[str, Sequence[Sequence[int]]], kind: _Kind
) -> dict[str, ProcessGroup]:
    world = kind.world
    for lists in rank_lists.values():
        _validate(lists, world_size=world.size())
    found: dict[str, ProcessGroup] = {}
    for parts in _rounds(rank_lists):
        what = "; ".join(f"{part.name} {part.ranks}" for part in parts)
        call = agree_on_call(f"{what} {kind.backend}", range(world.size()))
        mine = next((part for part in parts if world.rank() in part.ranks), None)
        group = _make_own(parts, mine, kind, call)
        if mine is not None and group is not None:
            found[mine.name] = _finish(group, call, kind, name=mine.name)
    return found


class _Part(NamedTuple):
    name: str
    ranks: list[int]


def _rounds(rank_lists: Mapping[str, Sequence[Sequence[int]]]) -> Iterator[list[_Part]]:
    """Assign each list to the first round in which no other list has a rank of it."""
    rounds: list[tuple[set[int], list[_Part]]] = []
    for name, lists in rank_lists.items():
        for ranks in map(list, lists):
            taken, parts = next(
                (each for each in rounds if each[0].isdisjoint(ranks)), (set[int](), list[_Part]())
            )
            if not parts:
                rounds.append((taken, parts))
            taken.update(ranks)
            parts.append(_Part(name, ranks))
    return (parts for _, parts in rounds)


def _make_own(
    parts: Sequence[_Part], mine: _Part | None, kind: _Kind, call: Call
) -> ProcessGroup | None:
    """Make the groups of disjoint parts; return the group of this rank."""
    # Unlike torch's own name, this one is the same on members with different numbers of groups.
    torch_name = call.key if mine is None else f"{call.key}/{mine.ranks[0]}/{mine.name}"
    group: ProcessGroup | None = None
    splits = kind.on_cuda and _internals.can_split(kind.world)
    shared = [part.ranks for part in parts if len(part.ranks) > 1]
    if splits and shared:
        with _internals.naming_groups(torch_name):
            group = dist.split_group(
                split_ranks=shared,
                timeout=kind.timeout,
                pg_options=kind.options(),
                group_desc=parts[0].name if mine is None else mine.name,
            )
    for part in parts:
        if len(part.ranks) == 1 or not splits:
            # torch needs no call of other ranks; a dry run records all groups.
            made = _make_alone(part.ranks, torch_name, kind, name=part.name)
            group = made if part is mine else group
    return group


def _make_alone(
    ranks: Sequence[int], torch_name: str, kind: _Kind, *, name: str
) -> ProcessGroup | None:
    """Make a group by its members alone, without connecting a group of a single rank.

    NCCL would take 512 MiB of the device for peers of a single rank (NVIDIA/nccl #2363).
    """
    with (
        _unbound(kind.world) as device,
        _internals.on_gloo_devices_of(kind.world),
        _internals.naming_groups(torch_name),
    ):
        group: ProcessGroup | None = dist.new_group(
            list(ranks),
            timeout=kind.timeout,
            backend=kind.backend,
            pg_options=kind.options(),
            use_local_synchronization=True,
            group_desc=name,
            device_id=device if kind.on_cuda and len(ranks) > 1 else None,
        )
    return group


def _finish(group: ProcessGroup, call: Call, kind: _Kind, *, name: str) -> ProcessGroup:
    """Check that the members are ranks of this run, and connect them."""
    require_members(group, secret=call.secret, name=name)
    if kind.on_cuda and group.size() > 1:
        # Otherwise NCCL connects at the first use, and ranks may begin with different groups.
        dist.all_reduce(torch.zeros(1, device=_device(on_cuda=True)), group=group)
        torch.cuda.synchronize()
    return group


def resolve_group(mesh_or_group: DeviceMesh | ProcessGroup) -> ProcessGroup:
    """Return the process group of a one-dimensional mesh, or the given group itself.

    Raises:
        ValueError: If a mesh has more than one axis.
        TypeError: If the argument is neither.
    """
    if isinstance(mesh_or_group, ProcessGroup):
        return mesh_or_group
    if not isinstance(mesh_or_group, DeviceMesh):
        raise TypeError(
            f"mesh_or_group ({type(mesh_or_group).__name__}) must be a DeviceMesh or a ProcessGroup"
        )
    if mesh_or_group.ndim != 1:
        raise ValueError(
            f"mesh.ndim ({mesh_or_group.ndim}) must equal 1: select one axis of "
            f"{mesh_or_group.mesh_dim_names} first"
        )
    return mesh_or_group.get_group()


def mesh_of(
    group_by_axis: Mapping[str, ProcessGroup], ranks: Sequence[object], *, device_type: str
) -> DeviceMesh:
    """Build a `DeviceMesh` whose axes are existing groups.

    Args:
        group_by_axis: Axis name -> group of this rank along the axis, outermost axis first.
        ranks: Global ranks, as nested lists with one level for each axis.
        device_type: `"cpu"` or `"cuda"`.

    Raises:
        ValueError: If `ranks` has another depth than the number of axes, or the ranks along an axis
            differ from the ranks of its group.
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
    """Return the global rank of each rank of `group`; without a default group, its own ranks."""
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


def _serves_cuda(backend: str) -> bool:
    """Tell whether NCCL is part of a backend as `torch.distributed.new_group` takes it."""
    if backend == "undefined":  # what torch calls its own choice: NCCL where there is a GPU
        return torch.cuda.is_available()
    return "nccl" in backend


def _device(*, on_cuda: bool) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")


@contextmanager
def _unbound(world: ProcessGroup) -> Iterator[torch.device | None]:
    """Hide the device of the default group while another group is made without a split.

    Otherwise torch would split the default NCCL communicator on some of its ranks only (with Gloo
    on the ranks outside the new group, with NCCL on its members), which would wait forever.
    """
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield device
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
        along = mesh[(*position[:axis], slice(None), *position[axis + 1 :])].tolist()
        if along != global_ranks(group):
            raise ValueError(
                f"ranks along axis {name} ({along}) must equal those of its group "
                f"({global_ranks(group)})"
            )
