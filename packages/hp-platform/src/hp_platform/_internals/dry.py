# ruff: noqa: SLF001  # the purpose of this module
"""The private torch symbols of `hp_platform.dry`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch._subclasses import fake_tensor
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

__all__ = ["DisableTorchFunction", "tree_map_only"]


_base: Any = torch._C.TensorBase
_is_meta, _device_of = _base.is_meta.__get__, _base.device.__get__


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that does not import torch's compiler to be left alone by it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def is_meta(x: Tensor) -> bool:
    """Whether torch keeps `x` on `meta`, whatever `Tensor.is_meta` says meanwhile."""
    with DisableTorchFunction():
        on_meta: bool = _is_meta(x)
    return on_meta


def raw_device(x: Tensor) -> torch.device:
    """The device of `x` as torch has it, whatever `Tensor.device` says meanwhile."""
    with DisableTorchFunction():
        device: torch.device = _device_of(x)
    return device


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number that no other storage has while this one lives."""
    key: int = storage._cdata
    return key


def is_fake_mode_active() -> bool:
    """Whether torch works out shapes with fake tensors on this thread."""
    key: Any = torch._C._TorchDispatchModeKey.FAKE
    return torch._C._get_dispatch_mode(key) is not None


def default_device() -> torch.device | None:
    """The device of `with torch.device(...)` or `torch.set_default_device`; None without one."""
    device: Any = _device.CURRENT_DEVICE
    return device  # type: ignore[no-any-return]


def wrapper_maker() -> Callable[..., Any]:
    """What makes tensors that wrap others, such as those whose collective is under way."""
    maker: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
    return maker


def accelerator_name() -> tuple[Any, str]:
    """What tells the accelerator of this build of torch: its module and its name."""
    usual: Any = torch._C._get_accelerator
    return torch._C, usual.__name__


@contextmanager
def without_gpu_contexts() -> Iterator[None]:
    """Let fake tensors not set up the GPU that they would be on, as versions before 2.13 do."""
    usual = getattr(fake_tensor, "init_gpu_context", None)
    if usual is None:
        yield
        return
    module: Any = fake_tensor
    module.init_gpu_context = lambda _device: None
    try:
        yield
    finally:
        module.init_gpu_context = usual


def grouping() -> tuple[Any, str, Callable[..., Any]]:
    """What sorts tensors by device for optimizers: its module, its name, and itself."""
    name = "_group_tensors_by_device_and_dtype"
    return torch._C, name, torch._C._group_tensors_by_device_and_dtype


def schema_of(func: Any) -> Any:
    """The schema of an overload of an operator."""
    return func._schema


@contextmanager
def operator_kernels(kernels: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Let aten operators of meta tensors, that torch composes of others, be these functions."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, kernel in kernels.items():
            library.impl(name, kernel, "AutogradMeta")
        yield
    finally:
        library._destroy()


def current_node() -> Any:
    """The node of backward that this thread runs; None if it runs none."""
    return torch._C._current_autograd_node()


def sequence_number(node: Any) -> int:
    """When the operator of a node of backward was run, by a counter of the thread that ran it."""
    number: int = node._sequence_nr()
    return number
