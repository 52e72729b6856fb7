"""Two devices on a machine without a GPU, to find operators whose operands are on both."""

from __future__ import annotations

import importlib
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
from hp_platform.device import may_mix

STAND_IN = torch.device("cpu", 0)
"""Device that stands in for the accelerator inside `watch_devices`."""

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_BY_OPTIONS = ("aten::_to_copy", "aten::new_empty_strided")
"""Operators by which torch casts and copies gradients with the options of a tensor, which say `cpu`
for both devices; calls of `Tensor.to` in a program do not use them."""


@contextmanager
def watch_devices() -> Iterator[list[str]]:
    """Let `STAND_IN` be a device besides the CPU, and check every operator inside the context.

    Threads that are started inside are checked as well. Methods of classes are patched meanwhile:
    use one context in a process at a time, from before the first tensor of the device is made until
    the threads have ended.

    torch distinguishes the devices `cpu:0` and `cpu` but uses the same memory for both. So here
    `cpu` is the host and `cpu:0` stands in for the accelerator: the device of each storage is
    recorded, and `Tensor.device` reports it. Everything else is real: values, autograd, threads of
    ranks, Gloo. Operators that CUDA would refuse because their operands are on two devices are
    found, as far as the code is the same on both. Branches for devices of type `cuda` do not run:
    streams, events, pinned memory, kernels of CUDA.

    Yields:
        List of operators with operands on two devices, and of reads of the device through `numpy`,
        each with its devices and its line; it grows as they run. Operands that CUDA accepts are not
        counted: copies, indices on the host, and scalars on the host (tensors without dims) of
        pointwise operators, except fused and foreach operators.
    """
    places = _Places()
    with ExitStack() as stack:
        for owner, name, value in _changes(places):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(_Watch(places))
        yield places.found


class _Places:
    """Storages on the stand-in, and operators that were found."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._there: WeakSet[torch.UntypedStorage] = WeakSet()

    def put(self, x: Tensor) -> Tensor:
        """Record that a new tensor is on the stand-in."""
        self._there.add(x.untyped_storage())
        return x

    def has(self, x: Tensor) -> bool:
        """Tell whether a tensor is on the stand-in."""
        if type(x) not in _PLAIN:
            return _internals.device_of(x) == STAND_IN  # a wrapper reports its device itself
        return x.layout is torch.strided and x.untyped_storage() in self._there

    def report(self, name: str, why: str) -> None:
        """Record an operator that CUDA would refuse."""
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
            return NotImplemented  # tensors inside a DTensor or its like come here by themselves
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
    """Yield functions that call no operator, or ask for a device: owner, name, and replacement."""

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
    sharding = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")
    yield sharding, "_get_device_from_mesh", lambda _mesh: STAND_IN
    # Shared memory is memory of the host; without a channel, tensors are sent from the device.
    yield Channel, "connect", lambda *_, **__: None


class _Move(torch.autograd.Function):
    """Copy to another device, whose backward copies the gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: torch.device) -> Tensor:
        ctx.device = x.device
        return torch.empty_like(x, device=device).copy_(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.device), None


def _asked(args: Arguments, kwargs: Keywords) -> torch.device | None:
    """Return the device among the arguments of `Tensor.to`; None if there is none."""
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
    """Return the innermost line outside torch and this file."""
    torchs = str(Path(torch.__file__).parent)
    for frame, line in traceback.walk_stack(sys._getframe(1)):  # of this thread
        name = frame.f_code.co_filename
        if not name.startswith((torchs, __file__, "<")):
            return f"{name}:{line}"
    return "a line of torch"
