"""Counting how often the host waits for values of a device."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_SYNCING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique", "unique_", "bincount")
_COMPARING = ("equal", "is_same_size")
_METHODS = ("tolist", "numpy", "cpu", "__array__")


@contextmanager
def host_reads(device: torch.device | str = "cpu") -> Iterator[list[str]]:
    """Collect the names of what makes the host wait for values of a device, in this context.

    Those are `tolist`, `item` and all that ends there (`bool`, `int`, `float`, an index), `numpy`,
    `cpu`, copies to the host, operators whose result has a size that depends on values (`nonzero`,
    masks as indices, `unique`, `repeat_interleave` without `output_size`, ...), and on CUDA the
    `synchronize` of events, streams and devices. With "cpu" the CPU is taken for a device, so that
    what would wait on a GPU is found without one.

    It changes methods of classes meanwhile: use it in one thread of a process at a time.

    Args:
        device: Whose values; only the type counts.

    Yields:
        A list that grows as reads happen.
    """
    kind = torch.device(device).type
    with ExitStack() as stack:
        mode = stack.enter_context(_Watch(kind))
        for name in _METHODS:
            method = getattr(Tensor, name)
            stack.enter_context(patch.object(Tensor, name, _counting(name, method, mode)))
        if kind == "cuda":
            for owner in (torch.cuda.Event, torch.cuda.Stream, torch.cuda):
                wait = _noting(owner.synchronize, mode)
                stack.enter_context(patch.object(owner, "synchronize", wait))
        yield mode.found


class _Watch(TorchDispatchMode):
    """Notes operators down."""

    def __init__(self, kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind, self.found = kind, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::")
        if self._waits(name, args, kwargs):
            self.found.append(name)
        return func(*args, **kwargs)

    def _waits(self, name: str, args: Any, kwargs: Any) -> bool:
        on_device = [t for t in args if isinstance(t, Tensor) and t.device.type == self.kind]
        if name.startswith("repeat_interleave") and on_device:
            return kwargs.get("output_size") is None
        if name.startswith(("index.", "index_put", "_index_put_impl")) and on_device:
            return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
        if name.startswith("_to_copy") and on_device:
            to = kwargs.get("device")
            return to is not None and to.type == "cpu" and self.kind != "cpu"
        if name.startswith("copy_"):
            source = args[1]
            leaves = source.device.type == self.kind and args[0].device.type != self.kind
            return bool(leaves and not (kwargs.get("non_blocking") or args[2:3] == (True,)))
        return name.startswith(_SYNCING + _COMPARING) and bool(on_device)


def _counting(name: str, method: Callable[..., Any], mode: _Watch) -> Callable[..., Any]:
    def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == mode.kind:
            mode.found.append(name)
        return method(self, *args, **kwargs)

    return read


def _noting(wait: Callable[..., Any], mode: _Watch) -> Callable[..., Any]:
    def synchronize(*args: Any, **kwargs: Any) -> Any:
        mode.found.append("synchronize")
        return wait(*args, **kwargs)

    return synchronize
