"""Operators for which the host waits, because they copy between host and device.

Each function replaces an operator: it gets the device, the operator and its arguments, and returns
the result, or `NotImplemented` if the operator can run as usual. For values that the device would
have computed the host reads 0, 0.0 or False, so that results whose number of rows depends on such
values have 0 rows.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from hp_dry._internals import Arguments, Keywords, Operator, is_meta
from hp_dry.operators.results import MASKS
from hp_dry.recording.recorder import DeviceRecorder
from hp_dry.trace import HostWait, Launch

StandIn: TypeAlias = Callable[[DeviceRecorder, Operator, Arguments, Keywords], object]
"""Function that replaces an operator."""
_LARGE = 2**20
"""Bytes of pinned memory from which on copies of the device into it are not carried out."""


@dataclass(frozen=True, slots=True)
class Again:
    """Arguments with which the operator runs as usual."""

    args: tuple[object, ...]


def wait(device: DeviceRecorder, what: str, num_bytes: int = 0) -> None:
    """Record that the host waits for the work that the current stream has so far."""
    device.emit(HostWait(what=what, stream=device.thread.stream, num_bytes=num_bytes))


def copy_between(
    device: DeviceRecorder, host: Tensor, dry: Tensor, *, to_host: bool, non_blocking: bool
) -> None:
    """Record a copy between the host and the device, with its faults."""
    num_bytes = host.numel() * host.element_size()
    if not num_bytes:
        return
    block = (device.block_of(dry),)
    what = "copy to host" if to_host else "copy to device"
    reads, writes = (block, ()) if to_host else ((), block)
    buffer = (device.buffers.number(host),) if non_blocking and device.is_pinned(host) else ()
    device.emit(
        Launch(
            what=what,
            stream=device.thread.stream,
            num_kernels=1,
            num_bytes=num_bytes,
            flops=0,
            reads=reads,
            writes=writes,
            host_reads=() if to_host else buffer,
            host_writes=buffer if to_host else (),
        )
    )
    if buffer:
        return
    if non_blocking:
        first = f"{str(host.dtype)[6:]}{list(host.shape)}"
        device.fault(f"asynchronous {what}: memory of the host that is not pinned, {first}")
    wait(device, what, num_bytes)


def _to_copy(device: DeviceRecorder, _: Operator, args: Arguments, kwargs: Keywords) -> object:
    x, target, dtype = args[0], kwargs.get("device"), kwargs.get("dtype")
    non_blocking = bool(kwargs.get("non_blocking"))
    if not is_meta(x):
        return _to_device(device, x, dtype=dtype, non_blocking=non_blocking)
    if target is None or target.type != "cpu":
        return NotImplemented
    # The result has the layout of the copy, and its memory is not written.
    layout = torch.empty_like(x, dtype=dtype)
    host = torch.zeros(layout.numel(), dtype=layout.dtype).as_strided(layout.shape, layout.stride())
    if non_blocking:
        device.pin(host)  # as torch does
    copy_between(device, host, x, to_host=True, non_blocking=non_blocking)
    return host


def _to_device(
    device: DeviceRecorder,
    host: Tensor,
    *,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
) -> Tensor:
    y = torch.empty_like(host, device="meta", dtype=dtype)
    device.see(y, "copy to device")
    copy_between(device, host, y, to_host=False, non_blocking=non_blocking)
    return y


def _copy_(device: DeviceRecorder, _: Operator, args: Arguments, kwargs: Keywords) -> object:
    target, source = args[:2]
    if is_meta(target) and is_meta(source):
        return NotImplemented
    non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    if is_meta(target):
        copy_between(device, source, target, to_host=False, non_blocking=non_blocking)
    else:
        copy_between(device, target, source, to_host=True, non_blocking=non_blocking)
        if not _is_store(device, target):
            target.zero_()
    return target


def _is_store(device: DeviceRecorder, host: Tensor) -> bool:
    """Tell whether a tensor is part of a large piece of pinned memory, as used for offloading.

    Such memory is zero from the start and is not written, so that it takes no memory of the system.
    """
    return host.untyped_storage().nbytes() >= _LARGE and device.is_pinned(host)


def untouched(x: Tensor) -> Tensor:
    """Make a contiguous tensor like another; a large one in memory that is not allocated yet."""
    if x.nbytes < _LARGE:
        return x
    # The system maps zeros without writing them; torch would write them.
    return torch.frombuffer(mmap.mmap(-1, x.nbytes), dtype=x.dtype).view(x.shape)


def _foreach_copy_(
    device: DeviceRecorder, func: Operator, args: Arguments, kwargs: Keywords
) -> object:
    pairs = list(zip(args[0], args[1], strict=True))
    if all(is_meta(target) and is_meta(source) for target, source in pairs):
        return NotImplemented
    for pair in pairs:
        if _copy_(device, func, (*pair, *args[2:]), kwargs) is NotImplemented:
            pair[0].copy_(pair[1])
    return args[0]


def _item(device: DeviceRecorder, _: Operator, args: Arguments, __: Keywords) -> object:
    x = args[0]
    wait(device, "aten._local_scalar_dense", x.element_size())
    return torch.zeros((), dtype=x.dtype).item()


def _equal(device: DeviceRecorder, *_: object) -> bool:
    wait(device, "aten.equal", 1)
    return False


def _nonzero(device: DeviceRecorder, _: Operator, args: Arguments, __: Keywords) -> object:
    wait(device, "aten.nonzero", 8)
    return torch.empty(0, args[0].dim(), dtype=torch.int64, device="meta")


def _masked_select(device: DeviceRecorder, _: Operator, args: Arguments, __: Keywords) -> object:
    wait(device, "aten.masked_select", 8)
    return torch.empty(0, dtype=args[0].dtype, device="meta")


def _unique(device: DeviceRecorder, func: Operator, args: Arguments, __: Keywords) -> object:
    wait(device, str(func).removesuffix(".default"), 8)
    x = args[0]
    values = torch.empty(0, dtype=x.dtype, device="meta")
    inverse = torch.empty(x.shape, dtype=torch.int64, device="meta")
    return values, inverse, torch.empty(0, dtype=torch.int64, device="meta")


def _repeat_interleave(
    device: DeviceRecorder, _: Operator, args: Arguments, kwargs: Keywords
) -> object:
    num_rows = kwargs.get("output_size")
    if num_rows is None:
        wait(device, "aten.repeat_interleave", 8)
    return torch.empty(num_rows or 0, dtype=args[0].dtype, device="meta")


def _bincount(device: DeviceRecorder, _: Operator, args: Arguments, kwargs: Keywords) -> object:
    wait(device, "aten.bincount", 8)
    weights = args[1] if len(args) > 1 else kwargs.get("weights")
    num = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
    dtype = torch.int64 if weights is None else torch.promote_types(weights.dtype, torch.float32)
    return torch.empty(num, dtype=dtype, device="meta")


def _index(device: DeviceRecorder, func: Operator, args: Arguments, _: Keywords) -> object:
    x, indices = args[:2]
    if not is_meta(x):
        return NotImplemented  # a fault: a tensor on the host is indexed by a tensor on the device
    if all(
        i is None or (is_meta(i) and i.dtype not in MASKS and device.block_of(i) >= 0)
        for i in indices
    ):
        return NotImplemented
    name = "aten." + func.name().split("::")[1].split(".")[0]
    fills = len(args) > 2 and args[2].numel() == 1 and len(indices) == 1
    if fills and is_meta(indices[0]):  # CUDA fills by the mask without reading a number
        return NotImplemented
    found: list[Tensor | None] = []
    for i in indices:
        if i is None:
            found.append(i)
        elif not is_meta(i):
            places = i.nonzero().unbind(1) if i.dtype in MASKS else (i,)
            found += [_to_device(device, place) for place in places]
        elif device.block_of(i) < 0:  # a list of numbers that torch has converted to a tensor
            device.see(i, "copy to device")
            host = torch.empty_like(i, device="cpu")
            copy_between(device, host, i, to_host=False, non_blocking=False)
            found.append(i)
        elif i.dtype in MASKS:
            wait(device, f"{name} by a mask", 8)
            found += [torch.empty(0, dtype=torch.int64, device="meta")] * i.dim()
        else:
            found.append(i)
    values = args[2:]
    if values and any(isinstance(i, Tensor) and i.numel() == 0 for i in found):
        return x if func.name().split(".")[0].endswith("_") else torch.empty_like(x)
    return Again((x, found, *values))


STAND_INS: dict[str, StandIn] = {
    "aten::_to_copy": _to_copy,
    "aten::copy_": _copy_,
    "aten::_foreach_copy_": _foreach_copy_,
    "aten::_local_scalar_dense": _item,
    "aten::item": _item,
    "aten::is_nonzero": lambda *given: bool(_item(*given)),
    "aten::equal": _equal,
    "aten::nonzero": _nonzero,
    "aten::masked_select": _masked_select,
    "aten::_unique2": _unique,
    "aten::unique_dim": _unique,
    "aten::unique_consecutive": _unique,
    "aten::repeat_interleave": _repeat_interleave,
    "aten::bincount": _bincount,
    "aten::index": _index,
    "aten::index_put": _index,
    "aten::index_put_": _index,
    "aten::_index_put_impl_": _index,
}
"""Replacements by the name of the operator without its overload."""
