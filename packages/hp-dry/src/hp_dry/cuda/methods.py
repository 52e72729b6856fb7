"""Methods of tensors, storages and threads that call no operator, on a dry device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hp_dry._internals import (
    Arguments,
    ByDevice,
    Device,
    DisableTorchFunction,
    Keywords,
    change,
    default_device,
    grouping,
    is_meta,
    wrapper_maker,
)
from hp_dry.cuda.streams import Stream
from hp_dry.operators.dispatch import PLAIN
from hp_dry.operators.results import META
from hp_dry.recording.recorder import DeviceRecorder
from hp_dry.trace import Borrow
from hp_platform._internals import device_of

_FROM_DATA = frozenset({torch.tensor, torch.as_tensor, torch.asarray})


class Functions(TorchFunctionMode):
    """Mode that intercepts functions of torch for facts that operators do not get.

    These are: a request for the device `meta` itself, which has no memory; the generator of random
    numbers; and numbers of the host that become a tensor of the device.
    """

    def __init__(self, device: DeviceRecorder) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> object:
        if func is Tensor.tolist:  # which is no operator
            self._device.touch("tolist", args)
        elif func in _FROM_DATA:
            return _from_data(func, args, kwargs or {})
        if func is torch.device and args and type(args[0]) is int:
            return torch.device("cuda", args[0])
        if not kwargs:
            return func(*args)
        if type(kwargs.get("device")) is int:
            kwargs = {**kwargs, "device": torch.device("cuda", kwargs["device"])}
        if _is(kwargs.get("device"), "meta"):
            with self._device.asked_for_meta():
                return func(*args, **kwargs)
        out = func(*args, **kwargs)
        generator = kwargs.get("generator")
        if isinstance(out, Tensor) and generator and generator.device.type != out.device.type:
            self._device.fault(f"a generator of {generator.device} draws numbers on {out.device}")
        return out


def _is(device: object, kind: str) -> bool:
    if isinstance(device, torch.device):
        return device.type == kind
    return isinstance(device, str) and device.split(":")[0] == kind


def _from_data(func: Callable[..., Tensor], args: Arguments, kwargs: Keywords) -> Tensor:
    """Make a tensor from numbers on the host, and copy it to the device if requested."""
    values = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    asked = kwargs.get("device")
    if asked is None and not isinstance(values, Tensor):
        asked = default_device()
    asked = torch.device("cuda", asked) if type(asked) is int else asked
    if not _is(asked, "cuda"):
        return func(*args, **kwargs)
    others = {name: x for name, x in kwargs.items() if name not in ("device", "requires_grad")}
    if isinstance(values, Tensor) and is_meta(values):
        made = values.to(**others) if others else values
    else:
        made = func(*args, **others, device="cpu").to(asked)
    return made.requires_grad_() if kwargs.get("requires_grad") else made


def enter_stand_ins(
    stack: ExitStack,
    device: DeviceRecorder,
    *,
    watching: Callable[[], AbstractContextManager[object]],
) -> None:
    """Let tensors say `cuda` and record threads until `stack` is closed.

    Args:
        stack: Stack that undoes the changes.
        device: Device that the tensors are on.
        watching: Context in which the operators of a thread are recorded.
    """
    _properties(stack, device)
    _moves(stack, device)
    _reads(stack, device)
    _memory(stack, device)
    _threads(stack, watching)


def _properties(stack: ExitStack, device: DeviceRecorder) -> None:
    thread, is_deferred = device.thread, device.storages.is_deferred

    def is_dry(x: Tensor) -> bool:
        if thread.in_kernel or not is_meta(x):
            return False
        return type(x) not in PLAIN or not is_deferred(x)  # a wrapper has no storage

    def seen_as(found: ByDevice) -> ByDevice:
        return {(device.device if on == META else on, dtype): x for (on, dtype), x in found.items()}

    stack.enter_context(grouping(seen_as))
    make = wrapper_maker()

    @functools.wraps(make)
    def make_wrapper(
        *args: object, **kwargs: object
    ) -> Tensor:  # its caller passes the patched `device`
        return make(*args, **{k: META if _is(x, "cuda") else x for k, x in kwargs.items()})

    change(
        stack,
        Tensor,
        device=property(lambda x: device.device if is_dry(x) else device_of(x)),
        is_cuda=property(is_dry),
        is_meta=property(lambda x: is_meta(x) and not is_dry(x)),
        get_device=lambda x: device.index if is_dry(x) else -1,
        _make_wrapper_subclass=staticmethod(make_wrapper),
    )


def _moves(stack: ExitStack, device: DeviceRecorder) -> None:
    plain_to = Tensor.to

    def to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        asked = args[0] if args else kwargs.get("device", kwargs.get("other"))
        if isinstance(asked, Tensor):
            args, kwargs = (asked.device, asked.dtype, *args[1:]), dict(kwargs)
            kwargs.pop("other", None)
            asked = asked.device
        on_device = _is(asked, "cuda") or type(asked) is int
        if on_device and type(x) in PLAIN and device.storages.is_deferred(x):
            raise NotImplementedError(
                "Cannot copy out of meta tensor; no data! Please use torch.nn.Module.to_empty()"
            )
        if on_device and args:
            args = (META, *args[1:])
        elif on_device:
            kwargs["device"] = META
        # A function mode would get the method of this name, which is this function.
        with DisableTorchFunction():
            if not _is(asked, "meta"):
                return plain_to(x, *args, **kwargs)
            with device.asked_for_meta():
                y = plain_to(x, *args, **kwargs)
                return torch.empty_like(y, device="meta") if y is x and x.is_cuda else y

    def cuda(x: Tensor, device: Device = None, *args: object, **kwargs: object) -> Tensor:
        kwargs |= dict(zip(("non_blocking", "memory_format"), args, strict=False))
        return to(x, "cuda" if device is None else device, **kwargs)

    change(stack, Tensor, to=to, cuda=cuda)


def _reads(stack: ExitStack, device: DeviceRecorder) -> None:
    plain_numpy = Tensor.numpy
    plain_repr: Callable[..., str] = Tensor.__repr__

    def numpy(x: Tensor, *args: Any, **kwargs: Any) -> object:
        if x.is_cuda:
            device.fault("numpy of a tensor that is not on the host")
            raise TypeError(
                f"can't convert {x.device} device type tensor to numpy. Use Tensor.cpu() to copy "
                "the tensor to host memory first."
            )
        with DisableTorchFunction():
            return plain_numpy(x, *args, **kwargs)

    def represent(x: Tensor, **kwargs: Any) -> str:
        if type(x) not in PLAIN or not x.is_cuda:
            return plain_repr(x, **kwargs)
        kind = "Parameter(...)" if isinstance(x, nn.Parameter) else "tensor(...)"
        return f"{kind[:-1]}, device='{x.device}', size={tuple(x.shape)}, dtype={x.dtype})"

    change(stack, Tensor, numpy=numpy, __repr__=represent)


def _memory(stack: ExitStack, device: DeviceRecorder) -> None:
    storages = device.storages
    plain_address, plain_resize = Tensor.data_ptr, torch.UntypedStorage.resize_

    def data_ptr(x: Tensor) -> int:
        with DisableTorchFunction():
            return storages.address(x) if is_meta(x) else plain_address(x)

    def resize_(storage: torch.UntypedStorage, size: int) -> object:
        out = plain_resize(storage, size)
        storages.resized(storage, "resize_", device.thread.stream)
        return out

    def pin_memory(x: Tensor, *_: object) -> Tensor:
        return x if device.is_pinned(x) else device.pin(x.clone())

    def record_stream(x: Tensor, stream: Stream) -> None:
        if (block := device.block_of(x)) >= 0:
            device.emit(Borrow(block=block, stream=stream.number))

    plain_device: Any = torch.UntypedStorage.device
    change(
        stack,
        torch.UntypedStorage,
        device=property(
            lambda storage: (
                device.device if storages.has(storage) else plain_device.__get__(storage)
            )
        ),
        resize_=resize_,
    )
    change(
        stack,
        Tensor,
        data_ptr=data_ptr,
        pin_memory=pin_memory,
        record_stream=record_stream,
        is_pinned=lambda x, *_: device.is_pinned(x),
    )


def _threads(stack: ExitStack, watching: Callable[[], AbstractContextManager[object]]) -> None:
    plain_run = Thread.run

    def run(thread: Thread) -> None:
        with watching():
            plain_run(thread)

    change(stack, Thread, run=run)
