# ruff: noqa: SLF001  # the purpose of this module
"""Every private torch symbol this package uses, in one place.

torch has no public spelling for these. A release that moves one of them breaks this file alone;
`tests/test_platform_internals.py` checks that each is there and behaves as the wrappers say.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DisableTorchFunction
from torch._C._distributed_c10d import (
    Backend,
    FileStore,
    HashStore,
    PrefixStore,
    Store,
    _register_process_group,
    _resolve_process_group,
    _unregister_process_group,
)

# `torch.compiler.disable` that does not import the compiler before the first call.
from torch._compile import _disable_dynamo as dynamo_disabled
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed import _functional_collectives as functional
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

AsyncCollectiveTensor = functional.AsyncCollectiveTensor
Operator: TypeAlias = "OpOverload[..., object]"
"""Overload of an operator, such as `torch.ops.aten.mm.default`."""
Arguments: TypeAlias = Sequence[Any]
"""Positional arguments of an operator: tensors, numbers and lists, as its schema has them."""
Keywords: TypeAlias = Mapping[str, Any]
"""Keyword arguments of an operator."""
W = TypeVar("W", bound=Tensor)

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "FileStore",
    "HashStore",
    "PrefixStore",
    "Store",
    "TorchDispatchMode",
    "dynamo_disabled",
    "tree_leaves",
]


# Renamed in 2.13, where the old names warn.
all_gather: Callable[..., dist.Work | None] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
"""Gathers the inputs `[N, ...]` of all ranks into the output `[ranks * N, ...]`, given first."""
reduce_scatter: Callable[..., dist.Work | None] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
"""Sums inputs `[ranks * N, ...]`; this rank's part goes into the output, given first."""


def functional_all_to_all(
    x: Tensor, output_splits: list[int] | None, input_splits: list[int] | None, group: ProcessGroup
) -> Tensor:
    """Launch an all-to-all and return its unwaited result."""
    if torch.compiler.is_compiling():
        return functional.all_to_all_single(x, output_splits, input_splits, group)
    # The operator behind it: the function above imports the compiler, which takes seconds.
    even = [x.shape[0] // group.size()] * group.size()
    y = torch.ops._c10d_functional.all_to_all_single(
        x, output_splits or even, input_splits or even, group.group_name
    )
    return AsyncCollectiveTensor(y)


def functional_wait(x: Tensor) -> Tensor:
    """Wait for the collective that writes `x` and return the plain tensor."""
    if torch.compiler.is_compiling():
        x = functional.wait_tensor(x)
    elif isinstance(x, AsyncCollectiveTensor):
        x = x.trigger_wait()
    return x


is_multithreading_enabled = torch._C._is_multithreading_enabled
"""Tells whether backward may run nodes in the device threads of the autograd engine."""
default_store = distributed_c10d._get_default_store
"""Returns the store that the default process group was initialised with."""


def clone_of(store: Store) -> Store:
    """Return another connection to a store."""
    plain: Any = store
    cloned: Store = plain.clone()
    return cloned


def all_groups() -> list[ProcessGroup]:
    """List the process groups of this process that torch knows, the default group last."""
    groups = list(distributed_c10d._world.pg_map)
    world = dist.group.WORLD
    return [group for group in groups if group is not world] + ([world] if world else [])


def nccl_options(*, high_priority: bool, timeout: timedelta | None) -> object:
    """Return the options of an NCCL group, with its time-out."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high_priority)
    if timeout is not None:
        options._timeout = timeout
    return options


def can_split(world: ProcessGroup) -> bool:
    """Tell whether NCCL groups can be split off the communicator of `world`.

    They can if torch connected the communicator when it made `world`, for the device that `world`
    is bound to, and if `world` has no backend for the CPU, which `split_group` would split as well.
    """
    device = world.bound_device_id
    if device is None or str(dist.get_backend(world)) != "nccl":
        return False
    return bool(getattr(backend_of(world, device), "supports_splitting", False))


def naming_groups(name: str) -> AbstractContextManager[object]:
    """Let torch give `name` to the group that is made inside the context.

    By default torch uses a hash that counts the groups of this process. The name begins the group's
    keys in the store, so that members with different numbers of groups would never meet.
    """
    return patch.object(distributed_c10d, "_process_group_name", lambda *_args, **_kwargs: name)


assert_async = torch._assert_async
"""Stops the device if a value on it is zero or False, without waiting on the host."""


def version_of(x: Tensor) -> int:
    """Return how many in-place writes the storage of `x` has seen."""
    return x._version


def fsdp_param_groups(module: Any) -> list[Any]:
    """List the groups of parameters that FSDP2 gathers together, of one sharded module."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def set_fsdp_hooks(module: Any, active: bool) -> None:
    """Replace FSDP2's hooks around a module's forward by hooks that do nothing, or restore them.

    Hooks that cast, and hooks that several modules share, are left as they are.
    """
    state = module._get_fsdp_state()
    state._lazy_init()  # as the first hook does
    policy = state._mp_policy
    if policy.param_dtype or policy.reduce_dtype or policy.output_dtype:
        return
    for handle, hook in (
        (state._pre_forward_hook_handle, state._pre_forward),
        (state._post_forward_hook_handle, state._post_forward),
    ):
        hooks = handle.hooks_dict_ref() if isinstance(handle, RemovableHandle) else None
        if hooks is not None:
            hooks[handle.id] = hook if active else _nothing


def _nothing(*_: object) -> None:
    """Do nothing, as a hook."""


to_copy: object = torch.ops.aten._to_copy.default
"""Operator behind `Tensor.to`, as a tensor subclass receives it."""


def shard_of(x: Any) -> Any:
    """Return the local tensor of a DTensor itself, on which FSDP2 looks for hooks."""
    return x._local_tensor


def make_wrapper(kind: type[W], inner: Tensor, *, dtype: torch.dtype) -> W:
    """Make a tensor subclass without memory, of the shape of `inner` and of another dtype."""
    return Tensor._make_wrapper_subclass(
        kind, inner.shape, strides=inner.stride(), dtype=dtype, device=inner.device
    )


def backend_of(group: ProcessGroup | None, device: torch.device) -> Backend | None:
    """Return the backend that serves `device` in `group`; None if there is none."""
    try:
        return None if group is None else group._get_backend(device)
    except RuntimeError:
        return None


def backend_name(group: ProcessGroup | None, device: torch.device) -> str | None:
    """Return the name of the backend that serves `device` in `group`; None if there is none."""
    backend = backend_of(group, device)
    return None if backend is None else backend.name()


def coalesces(group: ProcessGroup, device: torch.device) -> bool:
    """Tell whether the backend of `group` for `device` can start several operations as one."""
    return bool(getattr(backend_of(group, device), "supports_coalescing", False))


def device_of(x: Tensor) -> torch.device:
    """Return the device of `x` according to torch, even while `Tensor.device` is patched."""
    with DisableTorchFunction():
        device: torch.device = torch._C.TensorBase.device.__get__(x)
    return device


def group_timeout(group: ProcessGroup | None, device: torch.device) -> timedelta | None:
    """Return the time-out that `group` was made with; None if its backend does not say."""
    try:
        options = getattr(backend_of(group, device), "options", None)
    except RuntimeError:  # torch's answer for a backend that has none
        return None
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def knows_ranks(group: ProcessGroup) -> bool:
    """Tell whether torch maps the ranks of `group` to ranks of a default process group."""
    return group is dist.group.WORLD or group in distributed_c10d._world.pg_group_ranks


def known_groups() -> list[ProcessGroup]:
    """List the groups of this process that torch knows, with repetitions."""
    return [*distributed_c10d._world.pg_map, *distributed_c10d._world.pg_group_ranks]


def register_group(name: str, group: ProcessGroup, ranks: Sequence[int]) -> None:
    """Make `group` usable by functional collectives and by `torch.distributed` functions.

    Args:
        name: Name of the group.
        group: Group that `dist.new_group` did not make.
        ranks: Global ranks of its members.
    """
    group._set_group_name(cast("Any", name))
    _register_process_group(cast("Any", name), group)
    world = distributed_c10d._world
    world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}


def unregister_group(name: str, group: ProcessGroup) -> None:
    """Undo `register_group`."""
    _unregister_process_group(cast("Any", name))
    distributed_c10d._world.pg_group_ranks.pop(group, None)


def group_of(given: str | ProcessGroup | torch.ScriptObject) -> ProcessGroup:
    """Return the group that an operator between ranks is given: as it is, boxed, or by its name."""
    if isinstance(given, str):
        return _resolve_process_group(cast("Any", given))
    return given if isinstance(given, ProcessGroup) else ProcessGroup.unbox(given)


@contextmanager
def on_gloo_devices_of(group: ProcessGroup) -> Iterator[None]:
    """Let Gloo groups that are made inside the context use the devices of `group`, if it has any.

    Otherwise torch makes a device for each group, with a thread that wakes a hundred times a
    second. No other thread may make groups meanwhile, as everywhere in torch.
    """
    made_by: Any = dist.ProcessGroupGloo
    backend: Any = backend_of(group, torch.device("cpu"))
    # A group of NCCL alone, or the wrapper that debugging puts around Gloo, has none.
    devices = list(backend.options._devices) if isinstance(backend, made_by) else []
    if not devices:
        yield
        return

    # new_group has no argument for devices; it makes an instance of the class of this name.
    class OnDevices(made_by):  # type: ignore[misc]
        def __init__(
            self, store: Store, rank: int, size: int, timeout: timedelta, **others: bool
        ) -> None:
            if any(others.values()):  # torch 2.14 has a switch that options do not have
                super().__init__(store, rank, size, timeout=timeout, **others)
                return
            options = made_by._Options()
            options._devices, options._timeout = devices, timeout
            options._threads = 2 * len(devices)
            super().__init__(store, rank, size, options)

    try:
        with patch.object(distributed_c10d, "ProcessGroupGloo", OnDevices):
            yield
    finally:
        devices.clear()  # the groups have references of their own


def gloo_group(
    store: Store, *, rank: int, world_size: int, timeout: timedelta, name: str
) -> ProcessGroup:
    """Make a Gloo group on the loopback interface, independent of any default process group."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    backend = gloo(PrefixStore(name, store), rank, world_size, options)
    backend._set_sequence_number_for_group()
    group = ProcessGroup(PrefixStore(f"{name}/group", store), rank, world_size)
    kind = ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device("cpu"), kind, backend)
    group._set_default_backend(kind)
    return group


def record_memory_history(*, most: int) -> None:
    """Begin to record allocations of CUDA memory, with Python stacks.

    Args:
        most: Number of the latest records that are stored.
    """
    torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=most)


def end_memory_history() -> None:
    """Stop recording and drop the records."""
    torch.cuda.memory._record_memory_history(None)


def dump_memory_history(path: str) -> None:
    """Write the records for the viewer at pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(path)


def in_backward() -> bool:
    """Tell whether this thread runs a backward pass: its code is recomputation or a hook."""
    return bool(torch._C._current_graph_task_id() != -1)


def in_transform() -> bool:
    """Tell whether this code runs inside a transform of `torch.func`, such as `vmap`."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def has_modes() -> bool:
    """Tell whether a mode intercepts the operators of this thread."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())


@contextmanager
def without_modes() -> Iterator[None]:
    """Disable all modes of this thread inside the context."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield
