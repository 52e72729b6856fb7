"""Back ends that replace NCCL and Gloo in groups that torch makes with its own code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import ClassVar, Self

import torch
from torch.distributed import ProcessGroup, Work

from hp_dry._internals import (
    PluginOptions,
    backend_methods,
    backend_plugins,
    change,
    group_functions,
    name_group,
    new_nccl_group,
    placeholder,
    torch_functions,
)
from hp_dry.world.groups import Groups
from hp_platform._internals import PrefixStore, Store


class BackendOptions:
    """Options of a back end, as far as torch and this package use them."""

    def __init__(self, *, is_high_priority_stream: bool = False, **_: object) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)
        self._devices: list[object] = []
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self.config: object = None

    def __deepcopy__(self, _: object) -> BackendOptions:
        """Copy the options that a split group takes from its parent."""
        made = BackendOptions(is_high_priority_stream=self.is_high_priority_stream)
        made._timeout = self._timeout
        return made


class DryBackend:
    """Back end of one group, whose operations reach `DryWorld` as operators.

    `name()` is torch's name for NCCL, and `"gloo, dry"` for Gloo: code for the sockets of Gloo,
    such as proofs of membership, must not run here.
    """

    Options: ClassVar[type[BackendOptions]] = BackendOptions
    kind: ClassVar[str] = ""
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_tensor_alloc = False
    supports_shrinking = False

    def __init__(  # as torch calls it
        self,
        store: Store,
        rank: int,
        size: int,
        options: BackendOptions | None = None,
        timeout: timedelta | None = None,
        **_: object,
    ) -> None:
        self.options = options or BackendOptions()
        if timeout is not None:
            self.options._timeout = timeout  # noqa: SLF001 # named as in torch
        self._store, self._rank, self._size = store, rank, size
        self.placeholder = placeholder(rank, size)

    @classmethod
    def of_plugin(cls, given: PluginOptions, options: object) -> Self:
        """Make a back end from the arguments of a plugin of torch."""
        own = options if isinstance(options, BackendOptions) else None
        return cls(given.store, given.group_rank, given.group_size, own, given.timeout)

    def name(self) -> str:
        """Return the name of the back end."""
        return self.kind

    def rank(self) -> int:
        """Return the rank of this process in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks in the group."""
        return self._size

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of waits of the host."""
        self.options._timeout = timeout  # noqa: SLF001 # named as in torch

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None: ...

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def abort(self) -> None:
        """Do nothing: the abort of the group informs the world."""

    def shutdown(self) -> None:
        """Do nothing at the end."""


class ProcessGroupNCCL(DryBackend):
    """Replacement for torch's class of this name."""

    kind = "nccl"
    supports_splitting = True
    supports_coalescing = True

    def eager_connect_single_device(self, _: object) -> None:
        """Do nothing: the world knows from the device of the group that it is connected."""


class ProcessGroupGloo(DryBackend):
    """Replacement for torch's class of this name."""

    kind = "gloo, dry"
    create_device = staticmethod(lambda **_: None)


def enter_stand_ins(
    stack: ExitStack,
    groups: Groups,
    start_batch: Callable[[], None],
    end_batch: Callable[[], Work],
) -> None:
    """Let torch make groups of a world until `stack` is closed.

    Args:
        stack: Stack that undoes the changes.
        groups: Groups of the world.
        start_batch: Function that begins a batch of operations.
        end_batch: Function that ends it and returns its handle.
    """
    made: dict[int, DryBackend] = {}
    plain_register, plain_backend = backend_methods()

    def register(
        group: ProcessGroup, device: torch.device, kind: object, backend: object = None
    ) -> None:
        if isinstance(backend, DryBackend):
            made[id(backend.placeholder)] = backend
            backend = backend.placeholder
        plain_register(group, device, kind, backend)

    def get_backend(group: ProcessGroup, device: torch.device) -> object:
        found = plain_backend(group, torch.device(device))
        return made.get(id(found), found)

    def abort(group: ProcessGroup) -> None:  # a bound method would not get the group
        groups.give_up(group)

    change(
        stack,
        ProcessGroup,
        _register_backend=register,
        _get_backend=get_backend,
        _start_coalescing=lambda _group, _device: start_batch(),
        _end_coalescing=lambda _group, _device: end_batch(),
        split_group=_split_group,
        abort=abort,
        supports_coalescing=True,
    )
    functions: dict[str, object] = {
        "ProcessGroupNCCL": ProcessGroupNCCL,
        "ProcessGroupGloo": ProcessGroupGloo,
        "is_nccl_available": lambda: True,
        "is_gloo_available": lambda: True,
        "_NCCL_AVAILABLE": True,
        "_get_split_source": lambda *_: None,  # there is no communicator that C++ could split
        "default_pg_nccl_timeout": timedelta(minutes=10),
    }
    plugins = {"NCCL": ProcessGroupNCCL.of_plugin, "GLOO": ProcessGroupGloo.of_plugin}
    stack.enter_context(backend_plugins(**plugins))
    stack.enter_context(torch_functions(**functions, **_noting_groups(groups)))


def _split_group(  # noqa: PLR0917 # as torch calls it
    parent: ProcessGroup,
    ranks: list[int],
    timeout: timedelta | None = None,
    opts: BackendOptions | None = None,
    group_name: str = "",
    group_desc: str | None = None,
    **_: object,
) -> ProcessGroup | None:
    """Replace `ProcessGroup.split_group`, whose C++ code needs back ends in C++."""
    if parent.rank() not in ranks:
        return None
    position = sorted(ranks).index(parent.rank())
    store = PrefixStore(f"{group_name}/", parent.get_group_store())
    backend = ProcessGroupNCCL(store, position, len(ranks), opts, timeout)
    group = new_nccl_group(store, position, len(ranks), backend)
    name_group(group, group_name, group_desc or "undefined")
    return group


def _noting_groups(groups: Groups) -> dict[str, Callable[..., object]]:
    """Return the functions of torch that make groups, wrapped to record every group."""
    make, tagged, split, destroy = group_functions()

    def make_tagged(ranks: Sequence[int] | None = None, *args: object, **kwargs: object) -> object:
        # Only members make the group; hp_platform calls this on the other ranks as well.
        groups.makes_alone = bool(kwargs.get("use_local_synchronization"))
        try:
            if groups.makes_alone and ranks is not None and groups.rank not in ranks:
                groups.note_group(_purpose(kwargs), sorted(ranks))
            return tagged(ranks, *args, **kwargs)
        finally:
            groups.makes_alone = False

    def make_group(
        size: int, rank: int, ranks: list[int], *args: object, **kwargs: object
    ) -> object:
        known = list(ranks) or list(range(size))
        name = groups.note_group(_purpose(kwargs), known, is_first=not ranks)
        found = make(size, rank, ranks, *args, **kwargs)
        if isinstance(found[0], ProcessGroup):
            groups.note_member(found[0], *name, known)
        return found

    def split_group(
        parent_pg: ProcessGroup | None = None,
        split_ranks: Sequence[Sequence[int]] | None = None,
        *args: object,
        **kwargs: object,
    ) -> object:
        parent = parent_pg or torch.distributed.group.WORLD
        assert parent is not None
        lists = groups.split_lists(parent, split_ranks or [], _purpose(kwargs, ""))
        group = split(parent_pg, split_ranks, *args, **kwargs)
        if isinstance(
            group, ProcessGroup
        ):  # neither None nor the value of torch 2.14 for ranks outside
            groups.note_split(group, lists)
        return group

    def destroy_group(group: ProcessGroup | None = None) -> None:
        destroy(group)
        if group is None or group is torch.distributed.group.WORLD:
            groups.forget_groups()

    return {
        "_new_process_group_helper": make_group,
        "_new_group_with_tag": make_tagged,
        "split_group": split_group,
        "destroy_process_group": destroy_group,
    }


def _purpose(kwargs: Mapping[str, object], otherwise: str = "undefined") -> str:
    """Return the description of a group that torch's functions are given."""
    return str(kwargs.get("group_desc") or otherwise)
