"""Counting how often the host waits for values of a device."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import ParamSpec, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from hp_platform.testing import watch_operators

P = ParamSpec("P")
T = TypeVar("T")
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
    """Collect the names of calls in this context that make the host wait for values of a device.

    These are `tolist`, `item` and calls that use it (`bool`, `int`, `float`, an index), `numpy`,
    `cpu`, copies to the host, operators whose result has a size that depends on values (`nonzero`,
    masks as indices, `unique`, `repeat_interleave` without `output_size`, ...), and on CUDA the
    `synchronize` of events, streams and devices. With "cpu" the CPU is taken for a device, so that
    waits on a GPU are found without one.

    Methods of classes are changed in the context: use it in one thread of a process at a time.

    Args:
        device: Device whose values are read; only its type matters.

    Yields:
        A list that grows as reads happen.
    """
    kind, found = torch.device(device).type, list[str]()

    def look(name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
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


def _waits(name: str, args: tuple[object, ...], kwargs: Mapping[str, object], kind: str) -> bool:
    """Tell whether an operator makes the host wait for a device of this kind."""
    if not any(isinstance(t, Tensor) and t.device.type == kind for t in args):
        return False
    if name.startswith("repeat_interleave"):
        return kwargs.get("output_size") is None
    if name.startswith(("index.", "index_put", "_index_put_impl")):
        indices = args[1]
        assert isinstance(indices, list | tuple)
        return any(isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in indices)
    if name.startswith("_to_copy"):
        device = kwargs.get("device")
        return isinstance(device, torch.device) and device.type == "cpu" != kind
    if name.startswith("copy_"):
        to, source = args[:2]
        assert isinstance(to, Tensor)
        assert isinstance(source, Tensor)
        non_blocking = kwargs.get("non_blocking", args[2:3] == (True,))
        return to.device.type == "cpu" != source.device.type and not non_blocking
    return name.startswith(_SYNCING)


def _noting(
    call: Callable[P, T], name: str, found: list[str], *, kind: str | None = None
) -> Callable[P, T]:
    """Return the call, recorded in `found` if its tensor is on a device of this kind."""

    def noting(*args: P.args, **kwargs: P.kwargs) -> T:
        tensor = args[0] if args else None
        if kind is None or (isinstance(tensor, Tensor) and tensor.device.type == kind):
            found.append(name)
        return call(*args, **kwargs)

    return noting
