# ruff: noqa: SLF001  # the purpose of this module
"""The private torch symbols of the world of a dry run."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup, distributed_c10d

_REDUCTIONS = {
    int(getattr(dist.ReduceOp.RedOpType, name)): name.lower()
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
}
TORCH_MODULE: Any = distributed_c10d
_mesh_module: Any = importlib.import_module("torch.distributed.device_mesh")
_rendezvous_module: Any = importlib.import_module("torch.distributed.rendezvous")


def placeholder(rank: int, size: int) -> Any:
    """A back end that C++ can hold, and that nothing is asked of."""
    made: Any = c10d.FakeProcessGroup
    return made._create_internal(rank, size, made.Options())


class _Work(dist.Work):
    """For torch that has no `PythonCallbackWork`; must be kept alive by whoever made it."""

    def __init__(self, callback: Callable[[Any], bool]) -> None:
        super().__init__()
        self._callback = callback

    def wait(self, timeout: Any = None) -> bool:
        return self._callback(timeout)

    def is_completed(self) -> bool:
        return True


_kept: list[_Work] = []


def work_of(callback: Callable[[Any], bool]) -> Any:
    """A handle whose `wait(timeout)` calls `callback(timeout)`."""
    made: Any = getattr(c10d, "PythonCallbackWork", None)
    if made is not None:
        return made(callback)
    work = _Work(callback)
    _kept.append(work)
    return work


def group_of(boxed: Any) -> ProcessGroup:
    """The group that an operator of c10d is given."""
    return boxed if isinstance(boxed, ProcessGroup) else ProcessGroup.unbox(boxed)


def reduction_of(boxed: Any) -> str:
    """Name of a reduction that an operator of c10d is given."""
    number = boxed.op() if hasattr(boxed, "op") and callable(boxed.op) else int(boxed)
    return _REDUCTIONS.get(number, str(number))


def operator_names() -> list[str]:
    """Operators of c10d that carry out something between ranks."""
    schemas = torch._C._jit_get_all_schemas()
    names = {s.name.removeprefix("c10d::") for s in schemas if s.name.startswith("c10d::")}
    return sorted(names - {"check_for_nan"})


def arguments_of(name: str) -> tuple[list[str], int]:
    """Names of the arguments of an operator of c10d, and the number of values it returns."""
    schema = getattr(torch.ops.c10d, name).default._schema
    return [argument.name for argument in schema.arguments], len(schema.returns)


@contextmanager
def c10d_kernels(kernels: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Let operators of c10d on the CPU and on meta be these functions, in every thread."""
    library = torch.library.Library("c10d", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it overrides is what it is for
            for name, kernel in kernels.items():
                library.impl(name, kernel, "CPU")
                library.impl(name, kernel, "Meta")
        yield
    finally:
        library._destroy()


@contextmanager
def rendezvous_by(handler: Callable[..., Any]) -> Iterator[None]:
    """Let `handler(url, **kwargs)` answer where ranks meet, whatever they were told."""
    handlers = _rendezvous_module._rendezvous_handlers
    before = dict(handlers)
    handlers.update(dict.fromkeys(("env", "tcp", "file"), handler))
    try:
        yield
    finally:
        handlers.clear()
        handlers.update(before)


@contextmanager
def torch_functions(**values: Any) -> Iterator[None]:
    """Let functions of `torch.distributed` be these, under every name torch has for them."""
    with ExitStack() as stack:
        for name, value in values.items():
            for module in (TORCH_MODULE, dist, _mesh_module):
                if name in vars(module):
                    stack.callback(setattr, module, name, vars(module)[name])
                elif module is TORCH_MODULE or (module is dist and not name.startswith("_")):
                    stack.callback(delattr, module, name)
                else:
                    continue
                setattr(module, name, value)
        yield


@contextmanager
def accelerator(device: torch.device) -> Iterator[None]:
    """Let torch think that it is built for the accelerator `device`."""
    before = torch._C._get_accelerator
    torch._C._get_accelerator = lambda *_: device
    try:
        yield
    finally:
        torch._C._get_accelerator = before


def new_nccl_group(store: Any, rank: int, size: int, backend: Any) -> ProcessGroup:
    """A group of one back end, for CUDA."""
    group = ProcessGroup(store, rank, size)
    kind = ProcessGroup.BackendType.NCCL
    group._set_default_backend(kind)
    group._register_backend(torch.device("cuda"), kind, backend)
    return group


def name_group(group: ProcessGroup, name: str, purpose: str) -> None:
    """Say what a group is called, after it has its back end."""
    group._set_group_name(name)  # type: ignore[arg-type]
    group._set_group_desc(purpose)
