# ruff: noqa: SLF001  # the purpose of this module
"""The private torch symbols of `hp_platform.dry`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch._subclasses import fake_tensor
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

__all__ = ["DisableTorchFunction", "tree_map_only"]


_base: Any = torch._C.TensorBase
_is_meta = _base.is_meta.__get__


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


def accelerator(device: torch.device) -> AbstractContextManager[object]:
    """Let torch think that it is built for the accelerator `device`."""
    return patch.object(torch._C, "_get_accelerator", lambda *_: device)


def without_gpu_contexts() -> AbstractContextManager[object]:
    """Let fake tensors not set up the GPU that they would be on, as versions before 2.13 do."""
    if not hasattr(fake_tensor, "init_gpu_context"):
        return nullcontext()
    return patch.object(fake_tensor, "init_gpu_context", lambda _device: None)


def grouping(seen_as: Callable[[Any], Any]) -> AbstractContextManager[object]:
    """Let what sorts tensors by device for optimizers return `seen_as` of what it finds."""
    usual = torch._C._group_tensors_by_device_and_dtype
    name = "_group_tensors_by_device_and_dtype"
    return patch.object(torch._C, name, lambda *args, **kwargs: seen_as(usual(*args, **kwargs)))


def schema_of(func: Any) -> Any:
    """The schema of an overload of an operator."""
    return func._schema


def around_backward(
    entered: Callable[[], AbstractContextManager[Any]],
) -> AbstractContextManager[object]:
    """Let every run of the autograd engine happen inside a context.

    `Tensor.backward` is Python that torch calls without the function mode it went through.
    """
    usual: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        with entered():
            return usual(*args, **kwargs)

    return patch.object(torch.autograd, "_engine_run_backward", _engine_run_backward)


@contextmanager
def operator_kernels(
    namespace: str, kernels: dict[str, Callable[..., Any]], *keys: str
) -> Iterator[None]:
    """Let operators be these functions, in every thread.

    Args:
        namespace: Namespace of the operators, such as `"aten"`.
        kernels: Functions by the name of the operator.
        *keys: Keys of torch's dispatcher, such as `"Meta"`.
    """
    library = torch.library.Library(namespace, "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it overrides is what it is for
            for name, key in product(kernels, keys):
                library.impl(name, kernels[name], key, allow_override=True)
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
