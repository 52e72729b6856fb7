# ruff: noqa: SLF001  # the purpose of this module
"""Private torch symbols of `hp_dry`: for its device, then for its world."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from itertools import product
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DisableTorchFunction
from torch._C import _distributed_c10d as c10d
from torch._subclasses import fake_tensor
from torch.autograd.graph import Node
from torch.distributed import ProcessGroup, distributed_c10d
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from hp_platform._internals import Arguments, Keywords, Operator

__all__ = ["Arguments", "DisableTorchFunction", "Keywords", "Operator", "tree_map_only"]


ByDevice: TypeAlias = "Mapping[tuple[torch.device, torch.dtype], object]"
"""Tensors of an optimizer by device and dtype."""
Device: TypeAlias = torch.device | str | int | None
"""Device as functions of torch take it."""
PluginOptions: TypeAlias = "c10d._DistributedBackendOptions"
"""Group that torch asks a plugin to make a back end for."""
_WaitFunction: TypeAlias = "Callable[[timedelta | None], bool]"
_is_meta = vars(torch._C.TensorBase)["is_meta"].__get__


def change(stack: ExitStack, owner: object, **values: Any) -> None:
    """Set attributes of a class or a module until `stack` is closed."""
    stack.enter_context(patch.multiple(owner, create=True, **values))


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that does not import torch's compiler to be left alone by it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def is_meta(x: Tensor) -> bool:
    """Tell whether `x` is on `meta` for torch, even while `Tensor.is_meta` is patched."""
    with DisableTorchFunction():
        on_meta: bool = _is_meta(x)
    return on_meta


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that no other storage has while this one lives."""
    return int(storage._cdata)


def is_fake_mode_active() -> bool:
    """Tell whether torch works out shapes with fake tensors on this thread."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def default_device() -> torch.device | None:
    """Return the device of `with torch.device(...)` or `torch.set_default_device`, or None."""
    return _device.CURRENT_DEVICE


def wrapper_maker() -> Callable[..., Tensor]:
    """Return the function that makes tensor subclasses, such as results of async collectives."""
    return torch.Tensor._make_wrapper_subclass


def accelerator(device: torch.device) -> AbstractContextManager[object]:
    """Let torch report `device` as its accelerator inside the context."""
    return patch.object(torch._C, "_get_accelerator", lambda *_: device)


def without_gpu_contexts() -> AbstractContextManager[object]:
    """Prevent fake tensors from initialising a GPU, as versions of torch before 2.13 do."""
    if not hasattr(fake_tensor, "init_gpu_context"):
        return nullcontext()
    return patch.object(fake_tensor, "init_gpu_context", lambda _device: None)


def grouping(seen_as: Callable[[ByDevice], ByDevice]) -> AbstractContextManager[object]:
    """Apply `seen_as` to the result of the function that groups tensors for optimizers."""
    usual = torch._C._group_tensors_by_device_and_dtype
    return patch.object(
        torch._C,
        "_group_tensors_by_device_and_dtype",
        lambda *args, **kwargs: seen_as(usual(*args, **kwargs)),
    )


def schema_of(func: Operator) -> torch.FunctionSchema:
    """Return the schema of an overload of an operator."""
    return func._schema


def around_backward(
    entered: Callable[[], AbstractContextManager[object]],
) -> AbstractContextManager[object]:
    """Let every run of the autograd engine happen inside a context.

    `Tensor.backward` is Python code that torch calls without its function mode.
    """
    usual: Callable[..., object] = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def _engine_run_backward(*args: object, **kwargs: object) -> object:
        with entered():
            return usual(*args, **kwargs)

    return patch.object(torch.autograd, "_engine_run_backward", _engine_run_backward)


@contextmanager
def operator_kernels(
    namespace: str, kernels: Mapping[str, Callable[..., object]], *keys: str
) -> Iterator[None]:
    """Replace operators by functions in every thread.

    Args:
        namespace: Namespace of the operators, such as `"aten"`.
        kernels: Functions by the name of the operator.
        *keys: Keys of torch's dispatcher, such as `"Meta"`.
    """
    library = torch.library.Library(namespace, "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning about overriding
            for name, key in product(kernels, keys):
                library.impl(name, kernels[name], key, allow_override=True)
        yield
    finally:
        library._destroy()


def current_node() -> Node | None:
    """Return the node of backward that this thread runs; None if it runs none."""
    return torch._C._current_autograd_node()


def sequence_number(node: Node) -> int:
    """Return the number of a node's operator, counted by the thread that ran it in forward."""
    return int(node._sequence_nr())


# Of the world

_REDUCTIONS = {
    int(getattr(dist.ReduceOp.RedOpType, name)): name.lower()
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
}
TORCH_MODULE = distributed_c10d
_mesh_module = importlib.import_module("torch.distributed.device_mesh")
_rendezvous_module = importlib.import_module("torch.distributed.rendezvous")


def placeholder(rank: int, size: int) -> object:
    """Return a back end that C++ can store and nothing calls."""
    made: Any = c10d.FakeProcessGroup
    return made._create_internal(rank, size, made.Options())


def backend_methods() -> tuple[Callable[..., None], Callable[..., object]]:
    """Return the functions that set, and that return, a back end of a group."""
    return ProcessGroup._register_backend, ProcessGroup._get_backend


def group_functions() -> tuple[
    Callable[..., Sequence[object]],
    Callable[..., object],
    Callable[..., object],
    Callable[..., object],
]:
    """Return the functions of torch that make any group, make a new group, split and destroy."""
    return (
        TORCH_MODULE._new_process_group_helper,
        TORCH_MODULE._new_group_with_tag,
        TORCH_MODULE.split_group,
        TORCH_MODULE.destroy_process_group,
    )


class _Work(dist.Work):
    """Handle for versions of torch without `PythonCallbackWork`; `_kept` stores all of them."""

    def __init__(self, callback: _WaitFunction) -> None:
        super().__init__()
        self._callback = callback

    def wait(self, timeout: timedelta | None = None) -> bool:
        return self._callback(timeout)

    def is_completed(self) -> bool:
        return True


_kept: list[_Work] = []


def work_of(callback: _WaitFunction) -> dist.Work:
    """Return a handle whose `wait(timeout)` calls `callback(timeout)`."""
    made: Callable[[_WaitFunction], dist.Work] | None = getattr(c10d, "PythonCallbackWork", None)
    if made is not None:
        return made(callback)
    work = _Work(callback)
    _kept.append(work)
    return work


def reduction_of(given: Any) -> str:
    """Return the name of the reduction of an operator between ranks, given boxed or by name."""
    if isinstance(given, str):
        return given.lower()
    number = given.op() if hasattr(given, "op") and callable(given.op) else int(given)
    return _REDUCTIONS.get(number, str(number))


def operator_names() -> list[str]:
    """List the operators of c10d that communicate between ranks."""
    names = {schema.name for schema in torch._C._jit_get_all_schemas()} - {"c10d::check_for_nan"}
    return sorted(name.removeprefix("c10d::") for name in names if name.startswith("c10d::"))


def arguments_of(name: str) -> tuple[list[str], int]:
    """Return the names of the arguments of an operator of c10d, and its number of results."""
    schema = getattr(torch.ops.c10d, name).default._schema
    return [argument.name for argument in schema.arguments], len(schema.returns)


def backend_plugins(
    **makers: Callable[[PluginOptions, object], object],
) -> AbstractContextManager[object]:
    """Let torch 2.15 and later make back ends by these functions, by their names."""
    kind: Any = dist.Backend
    if not hasattr(kind, "_ensure_backend_registered"):
        return nullcontext()
    plugins = {name: kind._BackendPlugin(make, extended_api=True) for name, make in makers.items()}
    return patch.dict(kind._plugins, plugins)


def rendezvous_by(handler: Callable[..., object]) -> AbstractContextManager[object]:
    """Let `handler(url, **kwargs)` replace every rendezvous of ranks."""
    handlers = dict.fromkeys(("env", "tcp", "file"), handler)
    return patch.dict(_rendezvous_module._rendezvous_handlers, handlers)


@contextmanager
def torch_functions(**values: object) -> Iterator[None]:
    """Replace functions of `torch.distributed`, under all their names in torch."""
    with ExitStack() as stack:
        for name, value in values.items():
            for module in (TORCH_MODULE, dist, _mesh_module):
                is_public = module is dist and not name.startswith("_")
                if name in vars(module) or module is TORCH_MODULE or is_public:
                    stack.enter_context(patch.object(module, name, value, create=True))
        yield


def new_nccl_group(store: c10d.Store, rank: int, size: int, backend: object) -> ProcessGroup:
    """Return a group with one back end, for CUDA."""
    group = ProcessGroup(store, rank, size)
    kind = ProcessGroup.BackendType.NCCL
    group._set_default_backend(kind)
    register: Callable[..., None] = group._register_backend  # a stand-in, which takes any
    register(torch.device("cuda"), kind, backend)
    return group


def name_group(group: ProcessGroup, name: str, purpose: str) -> None:
    """Name a group that has its back end."""
    group._set_group_name(name)  # type: ignore[arg-type]
    group._set_group_desc(purpose)
