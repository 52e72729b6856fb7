"""Objects that ranks tell each other over NCCL: the device loses them, so the hosts say them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hp_platform._internals import dry_world
from hp_platform.dry.exchange import seconds_of

if TYPE_CHECKING:
    from hp_platform.dry.world import DryWorld


def enter_stand_ins(stack: ExitStack, world: DryWorld) -> None:
    """Let torch's object collectives over NCCL carry their objects until `stack` is closed.

    They are pickled, as torch does it, and go from one process of the dry run to another; what the
    device would do for them is done for their sizes.
    """
    objects = _Objects(world)
    names = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
    functions = {
        name: objects.over_nccl(getattr(dist, name), getattr(objects, name)) for name in names
    }
    stack.enter_context(dry_world.torch_functions(**functions))


class _Objects:
    def __init__(self, world: DryWorld) -> None:
        self._world = world

    def over_nccl(self, plain: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
        """`plain` for groups that serve the host, `ours` for others."""

        def either(*args: Any, group: ProcessGroup | None = None, **kwargs: Any) -> Any:
            positions = _GROUP_POSITIONS[plain.__name__]
            if group is None and len(args) > positions:
                args, group = args[:positions] + args[positions + 1 :], args[positions]
            chosen = dist.group.WORLD if group is None else group
            if not isinstance(chosen, ProcessGroup) or self._world.serves(chosen, "cpu"):
                return plain(*args, group=group, **kwargs)
            kwargs.pop("device", None)
            return ours(chosen, *args, **kwargs)

        return either

    def all_gather_object(self, group: ProcessGroup, object_list: list[Any], obj: Any) -> None:
        object_list[:] = self._everybody(group, obj)

    def gather_object(
        self,
        group: ProcessGroup,
        obj: Any,
        object_gather_list: list[Any] | None = None,
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
        object_list: list[Any],
        src: int | None = None,
        _device: Any = None,
        group_src: int | None = None,
    ) -> None:
        root = _root(group, src, group_src)
        object_list[:] = self._everybody(group, object_list)[root]

    def scatter_object_list(
        self,
        group: ProcessGroup,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int | None = None,
        group_src: int | None = None,
    ) -> None:
        root = _root(group, src, group_src)
        found = self._everybody(group, scatter_object_input_list)[root]
        scatter_object_output_list[0] = found[group.rank()]

    def _everybody(self, group: ProcessGroup, value: Any) -> list[Any]:
        """What every member gives; the device gathers sizes, which the host reads, and bytes."""
        world = self._world
        data = pickle.dumps(value)
        told = world.exchange.values(world.communicator(group), data, seconds_of(group))
        device = world.device.device
        sizes = torch.empty(len(told), dtype=torch.int64, device=device)
        dist.all_gather_into_tensor(
            sizes, torch.empty(1, dtype=torch.int64, device=device), group=group
        )
        sizes.cpu()
        longest = max(map(len, told))
        found = torch.empty(len(told) * longest, dtype=torch.uint8, device=device)
        mine = torch.empty(longest, dtype=torch.uint8, device=device)
        dist.all_gather_into_tensor(found, mine, group=group)
        found.cpu()
        return [pickle.loads(each) for each in told]  # noqa: S301 # of children of one process


_GROUP_POSITIONS = {
    "all_gather_object": 2,
    "gather_object": 3,
    "broadcast_object_list": 2,
    "scatter_object_list": 3,
}
"""Where the group is among the positional arguments."""


def _root(group: ProcessGroup, rank: int | None, position: int | None) -> int:
    if position is not None:
        return position
    return dist.get_group_rank(group, rank or 0)
