# ruff: noqa: SLF001  # the purpose of this module
"""The private torch symbols of the world of a dry run."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

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


def backend_methods() -> tuple[Callable[..., None], Callable[..., Any]]:
    """How a group is given a back end, and how it is asked for it."""
    return ProcessGroup._register_backend, ProcessGroup._get_backend


def group_functions() -> tuple[Callable[..., Any], ...]:
    """What makes every group of torch, what `new_group` calls, what splits one, and destroys."""
    module = TORCH_MODULE
    return (
        module._new_process_group_helper,
        module._new_group_with_tag,
        module.split_group,
        module.destroy_process_group,
    )


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


def reduction_of(given: Any) -> str:
    """Name of a reduction that an operator between ranks is given: boxed, or by its name."""
    if isinstance(given, str):
        return given.lower()
    number = given.op() if hasattr(given, "op") and callable(given.op) else int(given)
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


def backend_plugins(**makers: Callable[[Any, Any], Any]) -> AbstractContextManager[object]:
    """Let torch, from 2.15 on, make its own back ends by these functions, by their name."""
    kind: Any = dist.Backend
    if not hasattr(kind, "_ensure_backend_registered"):
        return nullcontext()
    plugins = {name: kind._BackendPlugin(make, extended_api=True) for name, make in makers.items()}
    return patch.dict(kind._plugins, plugins)


def rendezvous_by(handler: Callable[..., Any]) -> AbstractContextManager[object]:
    """Let `handler(url, **kwargs)` answer where ranks meet, whatever they were told."""
    handlers = dict.fromkeys(("env", "tcp", "file"), handler)
    return patch.dict(_rendezvous_module._rendezvous_handlers, handlers)


@contextmanager
def torch_functions(**values: Any) -> Iterator[None]:
    """Let functions of `torch.distributed` be these, under every name torch has for them."""
    with ExitStack() as stack:
        for name, value in values.items():
            for module in (TORCH_MODULE, dist, _mesh_module):
                is_public = module is dist and not name.startswith("_")
                if name in vars(module) or module is TORCH_MODULE or is_public:
                    stack.enter_context(patch.object(module, name, value, create=True))
        yield


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
