"""Object collectives over NCCL, carried out between hosts, since a dry device stores no values."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_dry._internals import torch_functions
from hp_dry.world.exchange import seconds_of
from hp_dry.world.groups import Groups
from hp_platform import _internals

T = TypeVar("T")


def enter_stand_ins(stack: ExitStack, groups: Groups) -> None:
    """Let torch's object collectives over NCCL carry their objects until `stack` is closed.

    Objects are pickled, as torch does, and sent between processes of the dry run. The operations of
    the device are carried out for the sizes of the objects.
    """
    objects = _Objects(groups)
    functions = {
        name: objects.over_nccl(getattr(dist, name), getattr(objects, name))
        for name in _GROUP_POSITIONS
    }
    stack.enter_context(torch_functions(**functions))


class _Objects:
    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def over_nccl(self, plain: Callable[..., T], ours: Callable[..., T]) -> Callable[..., T]:
        """Return a function that calls `plain` for groups with a host back end, else `ours`."""

        def either(*args: object, group: object = None, **kwargs: object) -> T:
            positions = _GROUP_POSITIONS[plain.__name__]
            if group is None and len(args) > positions:
                args, group = args[:positions] + args[positions + 1 :], args[positions]
            chosen = dist.group.WORLD if group is None else group
            if not isinstance(chosen, ProcessGroup) or self._groups.serves(chosen, "cpu"):
                return plain(*args, group=group, **kwargs)
            kwargs.pop("device", None)
            return ours(chosen, *args, **kwargs)

        return either

    def all_gather_object(
        self, group: ProcessGroup, object_list: list[object], obj: object
    ) -> None:
        object_list[:] = self._everybody(group, obj)

    def gather_object(
        self,
        group: ProcessGroup,
        obj: object,
        object_gather_list: list[object] | None = None,
        dst: int | None = None,
        group_dst: int | None = None,
    ) -> None:
        root = _root(group, dst, group_dst)
        found = self._everybody(group, obj)
        if group.rank() == root and object_gather_list is not None:
            object_gather_list[:] = found

    def broadcast_object_list(
        self,
        group: ProcessGroup,
        object_list: list[object],
        src: int | None = None,
        _device: object = None,
        group_src: int | None = None,
    ) -> None:
        root = _root(group, src, group_src)
        object_list[:] = self._everybody(group, object_list)[root]

    def scatter_object_list(
        self,
        group: ProcessGroup,
        scatter_object_output_list: list[object],
        scatter_object_input_list: list[object] | None = None,
        src: int | None = None,
        group_src: int | None = None,
    ) -> None:
        root = _root(group, src, group_src)
        found = self._everybody(group, scatter_object_input_list)
        scatter_object_output_list[0] = found[root][group.rank()]

    def send_object_list(
        self,
        group: ProcessGroup,
        object_list: list[object],
        dst: int | None = None,
        group_dst: int | None = None,
        *,
        use_batch: bool = False,
    ) -> None:
        peer, data = _root(group, dst, group_dst), pickle.dumps(object_list)
        groups = self._groups
        groups.exchange.send(groups.communicator(group), peer, data, "objects")
        for x in self._staged(len(object_list), len(data)):
            _pass(dist.isend, x, peer, group, use_batch=use_batch)

    def recv_object_list(
        self,
        group: ProcessGroup,
        object_list: list[object],
        src: int | None = None,
        group_src: int | None = None,
        *,
        use_batch: bool = False,
    ) -> int:
        peer, groups = _root(group, src, group_src), self._groups
        wait = groups.exchange.receive(groups.communicator(group), peer, "objects")
        data = wait(seconds_of(group))
        for x in self._staged(len(object_list), len(data)):
            _pass(dist.irecv, x, peer, group, use_batch=use_batch)
            x.cpu()
        object_list[:] = pickle.loads(data)  # noqa: S301 # of children of one process
        return dist.get_global_rank(group, peer)

    def _staged(self, num_objects: int, num_bytes: int) -> list[Tensor]:
        """Make the tensors that the device would exchange: sizes, then bytes."""
        device = self._groups.recorder.device
        return [
            torch.empty(num_objects, dtype=torch.int64, device=device),
            torch.empty(num_bytes, dtype=torch.uint8, device=device),
        ]

    def _everybody(self, group: ProcessGroup, value: object) -> list[Any]:
        """Gather a value of every member, with operations on sizes and bytes on the device."""
        groups, data = self._groups, pickle.dumps(value)
        given = groups.exchange.values(groups.communicator(group), data, seconds_of(group))
        longest = max(map(len, given))
        found = self._staged(len(given), len(given) * longest)
        for everyones, mine in zip(found, self._staged(1, longest), strict=True):
            _internals.all_gather(everyones, mine, group=group)
            everyones.cpu()
        return [pickle.loads(each) for each in given]  # noqa: S301 # of children of one process


def _pass(  # as torch does it: alone, or as a batch of one
    what: Callable[..., dist.Work | None],
    x: Tensor,
    peer: int,
    group: ProcessGroup,
    *,
    use_batch: bool,
) -> None:
    if use_batch:
        works: Sequence[dist.Work | None] = dist.batch_isend_irecv(
            [dist.P2POp(what, x, group=group, group_peer=peer)]
        )
    else:
        way = "group_dst" if what is dist.isend else "group_src"
        works = [what(x, group=group, **{way: peer})]
    for work in filter(None, works):
        work.wait()


_GROUP_POSITIONS = {
    "send_object_list": 2,
    "recv_object_list": 2,
    "all_gather_object": 2,
    "gather_object": 3,
    "broadcast_object_list": 2,
    "scatter_object_list": 3,
}
"""Position of the group among the positional arguments."""


def _root(group: ProcessGroup, rank: int | None, position: int | None) -> int:
    if position is not None:
        return position
    return dist.get_group_rank(group, rank or 0)
