"""Counting how often the host waits for values of a device."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hp_platform.testing import watch_operators

_METHODS = ("tolist", "numpy", "cpu")
_SYNCING = (
    "_local_scalar_dense",
    "_unique",
    "bincount",
    "equal",
    "masked_select",
    "nonzero",
    "unique_",
)


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
        device: Device whose values are meant; only the type counts.

    Yields:
        A list that grows as reads happen.
    """
    kind, found = torch.device(device).type, list[str]()

    def look(name: str, args: Any, kwargs: Any) -> None:
        name = name.removeprefix("aten::")
        if _waits(name, args, kwargs, kind):
            found.append(name)

    with ExitStack() as stack:
        stack.enter_context(watch_operators(look))
        for name in _METHODS:
            read = _noting(getattr(Tensor, name), name, found, kind=kind)
            stack.enter_context(patch.object(Tensor, name, read))
        if kind == "cuda":
            for owner in (torch.cuda.Event, torch.cuda.Stream, torch.cuda):
                wait = _noting(owner.synchronize, "synchronize", found)
                stack.enter_context(patch.object(owner, "synchronize", wait))
        yield found


def _waits(name: str, args: Any, kwargs: Any, kind: str) -> bool:
    """Tell whether an operator makes the host wait for a device of this kind."""
    if not any(isinstance(t, Tensor) and t.device.type == kind for t in args):
        return False
    if name.startswith("repeat_interleave"):
        return kwargs.get("output_size") is None
    if name.startswith(("index.", "index_put", "_index_put_impl")):
        return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    if name.startswith("_to_copy"):
        to = kwargs.get("device")
        return to is not None and to.type == "cpu" != kind
    if name.startswith("copy_"):
        non_blocking = kwargs.get("non_blocking", args[2:3] == (True,))
        return args[0].device.type == "cpu" != args[1].device.type and not non_blocking
    return name.startswith(_SYNCING)


def _noting(
    call: Callable[..., Any], name: str, found: list[str], *, kind: str | None = None
) -> Callable[..., Any]:
    """Note down the name of what is called, for a tensor on a device of this kind, if any."""

    def noting(*args: Any, **kwargs: Any) -> Any:
        if kind is None or args[0].device.type == kind:
            found.append(name)
        return call(*args, **kwargs)

    return noting
