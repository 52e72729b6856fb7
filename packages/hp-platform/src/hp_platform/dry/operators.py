"""Every operator of a dry run: what it is given and makes, and what the device would do for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hp_platform._internals import FakeTensor, TorchDispatchMode
from hp_platform._internals.dry import (
    DisableTorchFunction,
    default_device,
    is_fake_mode_active,
    is_meta,
    schema_of,
)
from hp_platform.device_rules import may_mix
from hp_platform.dry import launches, transfers
from hp_platform.dry.trace import Launch
from hp_platform.places import current_place
from hp_platform.dry import sites

if TYPE_CHECKING:
    from hp_platform.dry.device import DryDevice

_PLAIN = frozenset({Tensor, nn.Parameter, nn.Buffer})
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
META = torch.device("meta")


@dataclass(slots=True)
class Operator:
    """What is known of an overload of an operator.

    Attributes:
        name: Such as `"aten.mm.default"`.
        written: Places and names of the arguments that it writes.
        makes: Whether it makes tensors: not a view, and not one that only writes.
        is_silent: Whether CUDA launches nothing for it.
        resizes: Whether storages that it is given may have another size after it.
        flops: Counts them.
        special: What stands for it.
    """

    name: str
    base: str
    written: tuple[int | str, ...]
    makes: bool
    is_silent: bool
    resizes: bool
    is_collective: bool
    flops: Callable[..., int] | None
    special: Any


_known: dict[Any, Operator] = {}


def _describe(func: Any) -> Operator:
    schema = schema_of(func)
    written: list[int | str] = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(argument.name if argument.kwarg_only else place)
    aliases = [each.alias_info for each in schema.returns]
    makes = any(alias is None for alias in aliases)
    base = schema.name
    is_view = bool(aliases) and not makes and not any(alias.is_write for alias in aliases)
    return Operator(
        name=str(func),
        base=base,
        written=tuple(written),
        makes=makes,
        is_silent=is_view or base in launches.NO_KERNELS,
        resizes="resize" in base or "set_" in base or func.is_out_variant
        if hasattr(func, "is_out_variant")
        else "resize" in base or "set_" in base or "out" in str(func),
        is_collective=func.namespace in _COLLECTIVES,
        flops=launches.flops_of(func),
        special=transfers.SPECIAL.get(base),
    )


class Operators(TorchDispatchMode):
    """Looks at the operators of one thread."""

    def __init__(self, device: DryDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunction():
            return self._dispatch(func, types, args, kwargs or {})

    def _dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if is_fake_mode_active():
            return self._device.run_kernel(func, args, kwargs)  # torch works out shapes
        given: list[Tensor] = []
        _collect(args, given)
        if kwargs:
            _collect(kwargs.values(), given)
        for x in given:
            if type(x) not in _PLAIN:
                if isinstance(x, FakeTensor):
                    return self._device.run_kernel(func, args, kwargs)
                return NotImplemented  # DTensor and its like: what they are made of comes here
        asked = kwargs.get("device")
        on_meta = [x for x in given if is_meta(x)]
        if not on_meta and (asked is None or asked.type not in ("cuda", "meta")):
            if kwargs.get("pin_memory"):
                return self._device.pin(func(*args, **{**kwargs, "pin_memory": False}))
            return func(*args, **kwargs)
        return self._on_device(func, args, kwargs, given, on_meta)

    def _on_device(self, func, args, kwargs, given, on_meta):  # noqa: PLR0917
        device = self._device
        op = _known.get(func)
        if op is None:
            op = _known[func] = _describe(func)
        asked = kwargs.get("device")
        on_cuda = asked is not None and asked.type == "cuda"
        if on_cuda:
            device.check_index(asked)
            kwargs = {**kwargs, "device": META}
        storages = device.storages
        if not on_cuda and self._is_deferred(on_meta, given):
            return self._deferred(func, args, kwargs, on_meta)
        if op.is_collective:
            out = device.on_collective(func, args, kwargs)
            for x in _tensors(out):
                if type(x) in _PLAIN and is_meta(x):
                    storages.see(x, op.name, device.thread.stream)
            return out
        if len(on_meta) < len(given) and on_meta and not may_mix(func, args, is_meta):
            stranger = next(x for x in given if not is_meta(x))
            device.fault(
                f"{op.name}: operands on two devices, one of them "
                f"{str(stranger.dtype)[6:]}{list(stranger.shape)} on the host"
            )
        stream = device.thread.stream
        if op.special is not None:
            out = op.special(device, func, args, kwargs)
            if out is not NotImplemented:
                for x in _tensors(out):
                    if is_meta(x):
                        storages.see(x, op.name, stream)
                return out
        out = self._device.run_kernel(func, args, kwargs)
        if op.makes:
            made = [x for x in _tensors(out) if is_meta(x)]
            for x in made:
                storages.see(x, op.name, stream)
        else:
            made = []
        if op.resizes:
            for x in on_meta:
                storages.resized(x.untyped_storage(), op.name, stream)
        if not op.is_silent:
            self._launch(op, func, args, kwargs, on_meta, made, out)
        return out

    def _is_deferred(self, on_meta: list[Tensor], given: list[Tensor]) -> bool:
        """Whether what is made is to be on `meta`, where there is no memory."""
        if self._device.thread.asked_meta:
            return True
        if on_meta:
            return all(map(self._device.storages.is_deferred, on_meta))
        default = default_device()
        return not given and default is not None and default.type == "meta"

    def _deferred(self, func, args, kwargs, on_meta):
        out = self._device.run_kernel(func, args, kwargs)
        for x in _tensors(out):
            if is_meta(x):
                self._device.storages.defer(x)
        return out

    def _launch(self, op, func, args, kwargs, on_meta, made, out):
        device = self._device
        written: list[Tensor] = []
        for place in op.written:
            if isinstance(place, int):
                if place < len(args):
                    _collect((args[place],), written)
            elif place in kwargs:
                _collect((kwargs[place],), written)
        find = device.storages.find
        writes, reads, num_bytes = [], [], 0
        seen = {id(x) for x in written}
        for x in (*written, *made):
            num_bytes += x.numel() * x.element_size()
            block = find(x) if is_meta(x) else None
            if block is not None:
                writes.append(block.number)
        for x in on_meta:
            if id(x) in seen:
                if op.base.startswith("aten::zero_") or op.base.startswith("aten::fill_"):
                    continue
            num_bytes += x.numel() * x.element_size()
            block = find(x)
            if block is not None:
                reads.append(block.number)
        if not num_bytes:
            return
        flops = 0
        if op.flops is not None:
            flops = op.flops(*args, **kwargs, out_val=out)
        device.trace.events.append(
            Launch(
                at=sites.here(),
                place=current_place(),
                thread=device.thread_number(),
                what=op.name,
                stream=device.thread.stream,
                num_kernels=launches.num_kernels(op.base, len(on_meta)),
                num_bytes=num_bytes,
                flops=flops,
                reads=tuple(reads),
                writes=tuple(writes),
            )
        )


def _collect(values: Iterable[Any], found: list[Tensor]) -> None:
    for x in values:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, list | tuple):
            _collect(x, found)


def _tensors(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    found: list[Tensor] = []
    if isinstance(out, list | tuple):
        _collect(out, found)
    return found
