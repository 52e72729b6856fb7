"""What of tensors and storages does not come to the operators, while a dry device is there."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hp_platform._internals.dry import DisableTorchFunction, default_device, is_meta, raw_device
from hp_platform.dry.changes import change
from hp_platform.dry.trace import Borrow

if TYPE_CHECKING:
    from hp_platform.dry.device import DryDevice

META = torch.device("meta")


class AskedForMeta(TorchFunctionMode):
    """Remembers that somebody asks for `meta` itself: what is made then is deferred, not memory."""

    def __init__(self, device: DryDevice) -> None:
        super().__init__()
        self._thread = device.thread

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if type(kwargs.get("device")) is int:
            kwargs = {**kwargs, "device": torch.device("cuda", kwargs["device"])}
        if func in _FROM_DATA:
            return _from_data(func, args, kwargs)
        if "device" not in kwargs or not _is(kwargs["device"], "meta"):
            return func(*args, **kwargs)
        thread = self._thread
        before, thread.asked_meta = thread.asked_meta, True
        try:
            return func(*args, **kwargs)
        finally:
            thread.asked_meta = before


_FROM_DATA = frozenset({torch.tensor, torch.as_tensor, torch.asarray})


def _from_data(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Make a tensor of numbers on the host, and copy it to the device if that was asked for."""
    asked = kwargs.get("device")
    if asked is None and not (args and isinstance(args[0], Tensor)):
        asked = default_device()
    asked = torch.device("cuda", asked) if type(asked) is int else asked
    if asked is None or not _is(asked, "cuda"):
        x: Tensor = func(*args, **kwargs)
        return x
    values = args[0] if args else None
    if isinstance(values, Tensor) and is_meta(values):
        return values.to(kwargs.get("dtype") or values.dtype)
    needs_grad = bool(kwargs.get("requires_grad"))
    host = func(
        *args,
        **{**kwargs, "device": "cpu", "requires_grad": False}
        if func is not torch.as_tensor
        else {**kwargs, "device": "cpu"},
    )
    x = host.to(asked)
    return x.requires_grad_() if needs_grad else x


def _is(device: Any, kind: str) -> bool:
    if isinstance(device, torch.device):
        return device.type == kind
    return isinstance(device, str) and device.split(":")[0] == kind


@contextmanager
def stand_ins(device: DryDevice) -> Iterator[None]:
    """Let tensors say `cuda`, and threads be watched."""
    with ExitStack() as stack:
        _properties(stack, device)
        _moves(stack, device)
        _memory(stack, device)
        _threads(stack, device)
        yield


def _properties(stack: ExitStack, device: DryDevice) -> None:
    thread, deferred = device.thread, device.storages.is_deferred

    def is_dry(x: Tensor) -> bool:
        return is_meta(x) and not thread.in_kernel and not _deferred(x)

    def _deferred(x: Tensor) -> bool:
        try:
            return deferred(x)
        except (RuntimeError, NotImplementedError):  # a wrapper has no storage
            return False

    wrapper = Tensor._make_wrapper_subclass

    @functools.wraps(wrapper)
    def wrapped(*args: Any, **kwargs: Any) -> Any:  # AsyncCollectiveTensor passes a device on
        return wrapper(*args, **{k: META if _is(x, "cuda") else x for k, x in kwargs.items()})

    change(
        stack,
        Tensor,
        device=property(lambda x: device.device if is_dry(x) else raw_device(x)),
        is_cuda=property(is_dry),
        is_meta=property(lambda x: is_meta(x) and not is_dry(x)),
        get_device=lambda x: device.index if is_dry(x) else -1,
        _make_wrapper_subclass=staticmethod(wrapped),
    )


def _moves(stack: ExitStack, device: DryDevice) -> None:
    plain_to, plain_numpy, plain_repr = Tensor.to, Tensor.numpy, Tensor.__repr__
    deferred = device.storages.is_deferred

    def to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        asked = args[0] if args else kwargs.get("device")
        if type(asked) is int:
            asked = torch.device("cuda", asked)
        if _is(asked, "cuda"):
            if type(x) in (Tensor, torch.nn.Parameter) and is_meta(x) and deferred(x):
                raise NotImplementedError("Cannot copy out of meta tensor; no data!")
            args, kwargs = (
                (args and (META, *args[1:])),
                ({**kwargs, "device": META} if not args else kwargs),
            )
        elif _is(asked, "meta") and x.is_cuda:
            with DisableTorchFunction():
                shape = plain_to(x, *args, **kwargs)
            with AskedForMeta(device):
                return torch.empty_like(shape, device="meta")
        with DisableTorchFunction():  # a mode would be given the method of this name, which is this
            return plain_to(x, *args, **kwargs)

    def cuda(x: Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Tensor:  # noqa: FBT001, FBT002
        return to(x, device if device is not None else "cuda", non_blocking=non_blocking, **kwargs)

    def numpy(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.is_cuda:
            device.fault("numpy of a tensor that is not on the host")
            raise TypeError(
                f"can't convert {x.device} device type tensor to numpy. Use Tensor.cpu() to copy "
                "the tensor to host memory first."
            )
        with DisableTorchFunction():
            return plain_numpy(x, *args, **kwargs)

    def repr_(x: Tensor, **kwargs: Any) -> str:
        if not is_meta(x) or not x.is_cuda or type(x) not in (Tensor, torch.nn.Parameter):
            return plain_repr(x, **kwargs)
        return f"tensor(..., device='{x.device}', size={tuple(x.shape)}, dtype={x.dtype})"

    change(stack, Tensor, to=to, cuda=cuda, numpy=numpy, __repr__=repr_)


def _memory(stack: ExitStack, device: DryDevice) -> None:
    storages = device.storages
    plain_ptr, plain_resize = Tensor.data_ptr, torch.UntypedStorage.resize_

    def data_ptr(x: Tensor) -> int:
        with DisableTorchFunction():
            return storages.address(x) if is_meta(x) else plain_ptr(x)

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        out = plain_resize(storage, size)
        storages.resized(storage, "resize_", device.current_stream())
        return out

    def pin_memory(x: Tensor, *_: Any) -> Tensor:
        return x if device.is_pinned(x) else device.pin(x.clone())

    def record_stream(x: Tensor, stream: Any) -> None:
        if (block := device.block_of(x)) >= 0:
            device.emit(Borrow(block=block, stream=stream.number))

    change(
        stack,
        Tensor,
        data_ptr=data_ptr,
        pin_memory=pin_memory,
        is_pinned=lambda x, *_: device.is_pinned(x),
        record_stream=record_stream,
    )
    change(stack, torch.UntypedStorage, resize_=resize_)


def _threads(stack: ExitStack, device: DryDevice) -> None:
    plain_run = Thread.run

    def run(thread: Thread) -> None:
        with device.watching():
            plain_run(thread)

    change(stack, Thread, run=run)
