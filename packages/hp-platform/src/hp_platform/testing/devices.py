"""Two devices on a machine that has one: every operator's operands are to be on one of them."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import torch
from torch import Tensor, nn

from hp_platform import _internals
from hp_platform._internals import (
    Arguments,
    FakeTensor,
    Keywords,
    Operator,
    TorchDispatchMode,
    tree_leaves,
)
from hp_platform.collectives.shared_memory import Channel
from hp_platform.device.device import may_mix

STAND_IN = torch.device("cpu", 0)
"""The device that plays the accelerator inside `watch_devices`."""

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_BY_OPTIONS = ("aten::_to_copy", "aten::new_empty_strided")
"""With them torch casts and copies gradients, by the options of a tensor, which say `cpu` for both
devices; what a program asks `Tensor.to` for does not come there."""


@contextmanager
def watch_devices() -> Iterator[list[str]]:
    """Let `STAND_IN` be a device of its own beside the CPU, and look at every operator.

    Threads that are started inside are looked at as well. Methods of classes are changed meanwhile:
    use it once in a process at a time, from before the first tensor of the device is made until the
    threads have ended.

    torch takes `cpu:0` for another device than `cpu` wherever it is asked for one, and makes the
    same memory for both. So here `cpu` is the host, and `cpu:0` plays the accelerator: which
    storage is on which is remembered, and `Tensor.device` tells it. Everything else is real:
    values, autograd, threads of ranks, Gloo. What CUDA refuses, because operands are on two
    devices, is found where the same code runs as it would there. What is not run are branches for
    devices of type `cuda`: streams, events, pinned memory, kernels of CUDA.

    Yields:
        A list that grows as operators with operands on two devices are run, and reads of the device
        through `numpy`: the operator, its devices and the line. Not counted is what CUDA takes:
        copies, indices on the host, and scalars on the host (tensors of no dim) for operators that
        go element by element, though not for fused and foreach ones.
    """
    places = _Places()
    with ExitStack() as stack:
        for owner, name, value in _changes(places):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(_internals.fsdp_on(STAND_IN))
        stack.enter_context(_Watch(places))
        yield places.found


class _Places:
    """Which storages are on the stand-in, and what was found."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._there: WeakSet[torch.UntypedStorage] = WeakSet()

    def put(self, x: Tensor) -> Tensor:
        """Take a new tensor for one of the stand-in."""
        self._there.add(x.untyped_storage())
        return x

    def has(self, x: Tensor) -> bool:
        """Tell whether a tensor is on the stand-in."""
        if type(x) not in _PLAIN:
            return _internals.device_of(x) == STAND_IN  # a wrapper was told
        return x.layout is torch.strided and x.untyped_storage() in self._there

    def report(self, name: str, why: str) -> None:
        """Note what CUDA would refuse."""
        self.found.append(f"{name}: {why}, at {_where()}")


class _Watch(TorchDispatchMode):
    def __init__(self, places: _Places) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = places

    def __torch_dispatch__(
        self,
        func: Operator,
        types: object,
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> object:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(isinstance(x, FakeTensor) for x in given):
            return func(*args, **kwargs)  # torch works out shapes
        if any(type(x) not in _PLAIN for x in given):
            return NotImplemented  # DTensor and its like: what they are made of comes here
        devices = [self._places.has(x) for x in given]
        if len(set(devices)) > 1 and not may_mix(func, args, self._places.has):
            strangers = [x for x, there in zip(given, devices, strict=True) if not there]
            first = f"{str(strangers[0].dtype).removeprefix('torch.')}{list(strangers[0].shape)}"
            self._places.report(
                func.name(), f"{len(strangers)} of {len(given)} operands on the host, first {first}"
            )
        out = func(*args, **kwargs)
        asked = kwargs.get("device")
        if func.name().startswith(_BY_OPTIONS) and asked != STAND_IN and any(devices):
            asked = None
        if asked == STAND_IN or (asked is None and any(devices)):
            known = {id(x.untyped_storage()) for x in given if x.layout is torch.strided}
            for x in tree_leaves(out):
                if isinstance(x, Tensor) and id(x.untyped_storage()) not in known:
                    self._places.put(x)
        return out


def _changes(places: _Places) -> Iterator[tuple[object, str, object]]:
    """Yield what of torch does not come to the operators: owner, name, and what stands for it."""

    def device(x: Tensor) -> torch.device:
        return STAND_IN if places.has(x) else _internals.device_of(x)

    def to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        asked = _asked(args, kwargs)
        if asked in (STAND_IN, torch.device("cpu")):
            args = _without_device(args)
            kwargs = {name: value for name, value in kwargs.items() if name != "device"}
            x = x if x.device == asked else moved(x, asked)
        return plain_to(x, *args, **kwargs)

    def cpu(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return moved(x, torch.device("cpu")) if places.has(x) else plain_cpu(x, *args, **kwargs)

    def numpy(x: Tensor, *args: Any, **kwargs: Any) -> object:
        if places.has(x):
            places.report("numpy", "of a tensor that is not on the host")
        return plain_numpy(x, *args, **kwargs)

    def made(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make_there(*args: object, **kwargs: object) -> Tensor:
            x = make(*args, **kwargs)
            return places.put(x.clone()) if kwargs.get("device") == STAND_IN else x

        return make_there

    def run(thread: Thread) -> None:
        with _Watch(places):
            plain_run(thread)

    moved: Callable[[Tensor, torch.device], Tensor] = _Move.apply
    plain_run = Thread.run
    plain_to, plain_cpu, plain_numpy = Tensor.to, Tensor.cpu, Tensor.numpy
    yield Tensor, "device", property(device)
    yield Tensor, "to", to
    yield Tensor, "cpu", cpu
    yield Tensor, "numpy", numpy
    yield torch, "tensor", made(torch.tensor)
    yield torch, "as_tensor", made(torch.as_tensor)
    yield Thread, "run", run
    # Memory that processes share is the host's: what stands in its place sends from the device.
    yield Channel, "connect", lambda *_, **__: None


class _Move(torch.autograd.Function):
    """Copy to another device; the gradient comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: torch.device) -> Tensor:
        ctx.device = x.device
        return torch.empty_like(x, device=device).copy_(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.device), None


def _asked(args: Arguments, kwargs: Keywords) -> torch.device | None:
    """The device that `Tensor.to` is given."""
    for x in (*args[:1], kwargs.get("device"), kwargs.get("other")):
        if isinstance(x, Tensor):
            return x.device
        if isinstance(x, str | torch.device):
            return torch.device(x)
    return None


def _without_device(args: tuple[object, ...]) -> tuple[object, ...]:
    if args and isinstance(args[0], Tensor):
        return (args[0].dtype, *args[1:])
    return args[1:] if args and isinstance(args[0], str | torch.device) else args


def _where() -> str:
    """The innermost line that is neither torch's nor of this file."""
    torchs = str(Path(torch.__file__).parent)
    for frame, line in traceback.walk_stack(sys._getframe(1)):  # noqa: SLF001 # of this thread
        name = frame.f_code.co_filename
        if not name.startswith((torchs, __file__, "<")):
            return f"{name}:{line}"
    return "a line of torch"
