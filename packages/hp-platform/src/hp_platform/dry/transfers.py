"""Copies between host and device, and operators for which the host reads what the device has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hp_platform._internals.dry import is_meta
from hp_platform.dry.trace import HostWait, Launch

if TYPE_CHECKING:
    from hp_platform.dry.device import DryDevice


def _wait(device: DryDevice, what: str, num_bytes: int = 0) -> None:
    device.emit(HostWait(what=what, stream=device.current_stream(), num_bytes=num_bytes))


def copied(
    device: DryDevice, host: Tensor, dry: Tensor, *, to_host: bool, non_blocking: bool
) -> None:
    """Write down a copy between the host and the device."""
    num_bytes = host.numel() * host.element_size()
    if not num_bytes:
        return
    block = device.block_of(dry)
    device.emit(
        Launch(
            what="copy to host" if to_host else "copy to device",
            stream=device.current_stream(),
            num_kernels=1,
            num_bytes=num_bytes,
            flops=0,
            reads=(block,) if to_host else (),
            writes=() if to_host else (block,),
        )
    )
    pinned = device.is_pinned(host)
    if non_blocking and not pinned:
        device.fault(
            f"asynchronous copy {'to' if to_host else 'from'} host memory that is not pinned, "
            f"{str(host.dtype)[6:]}{list(host.shape)}"
        )
    if not (non_blocking and pinned):
        _wait(device, "copy to host" if to_host else "copy to device", num_bytes)


def _to_copy(device: DryDevice, func: Any, args: Any, kwargs: Any) -> Any:
    x, target = args[0], kwargs.get("device")
    non_blocking = bool(kwargs.get("non_blocking"))
    if not is_meta(x):  # to the device
        out = torch.empty_like(x, device="meta", dtype=kwargs.get("dtype"))
        device.storages.see(out, str(func), device.current_stream())
        copied(device, x, out, to_host=False, non_blocking=non_blocking)
        return out
    if target is None or target.type != "cpu":
        return NotImplemented
    out = torch.zeros(x.shape, dtype=kwargs.get("dtype") or x.dtype)
    if non_blocking:
        device.pin(out)
    copied(device, out, x, to_host=True, non_blocking=non_blocking)
    return out


def _copy_(device: DryDevice, func: Any, args: Any, kwargs: Any) -> Any:
    into, x = args[:2]
    non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    if is_meta(into) and is_meta(x):
        return NotImplemented
    if is_meta(into):
        copied(device, x, into, to_host=False, non_blocking=non_blocking)
    else:
        copied(device, into, x, to_host=True, non_blocking=non_blocking)
        into.zero_()
    return into


def _item(device: DryDevice, func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    _wait(device, "aten._local_scalar_dense", x.element_size())
    if x.dtype == torch.bool:
        return False
    return 0.0 if x.is_floating_point() else 0


def _nonzero(device: DryDevice, func: Any, args: Any, kwargs: Any) -> Any:
    _wait(device, "aten.nonzero", 8)
    x = args[0]
    return torch.empty(0, x.dim(), dtype=torch.int64, device="meta")


def _equal(device: DryDevice, func: Any, args: Any, kwargs: Any) -> Any:
    _wait(device, "aten.equal", 1)
    return False


SPECIAL = {
    "aten::_to_copy": _to_copy,
    "aten::copy_": _copy_,
    "aten::_local_scalar_dense": _item,
    "aten::nonzero": _nonzero,
    "aten::equal": _equal,
}
