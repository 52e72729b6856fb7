"""Dispatch mode that runs every operator of a dry run for its shapes and records its work."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import NotImplementedType

import torch
from torch import Tensor, nn

from hp_dry._internals import (
    Arguments,
    DisableTorchFunction,
    DispatchMode,
    Keywords,
    Operator,
    default_device,
    is_fake_mode_active,
    is_meta,
    schema_of,
    tree_map_only,
)
from hp_dry.operators import launches
from hp_dry.operators.results import META, WORKSPACES, Buffer, Cost, Made, form_of, made_of
from hp_dry.operators.values import STAND_INS, Again, StandIn, untouched
from hp_dry.recording.recorder import DeviceRecorder
from hp_dry.recording.tensors import tensors_in
from hp_dry.trace import Launch
from hp_platform._internals import FakeTensor
from hp_platform.device import may_mix

PLAIN = frozenset({Tensor, nn.Parameter, nn.Buffer})
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})


@dataclass(frozen=True, slots=True)
class _Operator:
    """Facts about an overload of an operator.

    Attributes:
        name: Name with the overload, such as `"aten.mm.default"`.
        writes: Positions, or names if keyword-only, of the arguments that it writes.
        overwrites: Whether it writes them without reading them.
        gathers: Whether it reads no more of its first argument than it returns.
        makes: Whether it returns new tensors: not a view, and not an argument that it wrote.
        is_silent: Whether CUDA launches nothing for it.
        resizes: Whether storages that it is given may have another size after it.
        repeats: Whether its results depend only on shapes, strides and dtypes of its tensors and on
            other arguments.
        is_collective: Whether it is an operation between ranks.
        may_move: Whether it copies between devices by another operator, which is dispatched by
            itself except inside operators of a DTensor and in inference mode.
        flops: Formula that counts its flops from its arguments and its result; None: it has none.
        stand_in: Function that is called instead, because the host reads values or a copy is
            between host and device; None: the operator itself is called.
        workspace: Function that sizes its temporary buffers; None: it has no known buffers.
    """

    name: str
    writes: tuple[int | str, ...]
    overwrites: bool
    gathers: bool
    makes: bool
    is_silent: bool
    resizes: bool
    repeats: bool
    is_collective: bool
    may_move: bool
    flops: Callable[..., int] | None
    stand_in: StandIn | None
    workspace: Callable[[Arguments, Keywords], list[Buffer]] | None


_known: dict[Operator, _Operator] = {}


def _describe(func: Operator) -> _Operator:
    schema = schema_of(func)
    written = [
        (place, argument)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    writes = tuple(each.name if each.kwarg_only else place for place, each in written)
    is_out = any(each.kwarg_only for _, each in written)
    aliases = [each.alias_info for each in schema.returns]
    makes = any(alias is None for alias in aliases)
    is_view = bool(aliases) and not makes and not writes
    base = schema.name
    resizes = is_out or "resize" in base or "::set_" in base
    return _Operator(
        name=str(func),
        writes=writes,
        overwrites=is_out or base in launches.OVERWRITES,
        gathers=base in launches.GATHERS,
        makes=makes,
        is_silent=is_view or launches.is_silent(func),
        resizes=resizes,
        repeats=makes
        and not (writes or resizes)
        and torch.Tag.nondeterministic_seeded not in func.tags,
        is_collective=func.namespace in _COLLECTIVES,
        may_move=base == "aten::to",
        flops=launches.flops_of(func),
        stand_in=STAND_INS.get(base),
        workspace=WORKSPACES.get(base),
    )


class Operators(DispatchMode):
    """Mode that records the operators of one thread."""

    supports_higher_order_operators = True

    def __init__(self, device: DeviceRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._seen: dict[Hashable, Made] = {}

    def __torch_dispatch__(
        self,
        func: Operator,
        types: object,
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> object:
        if not hasattr(func, "overloadpacket"):
            return self._higher_order(func, args, kwargs or {})
        with DisableTorchFunction():
            return self._dispatch(func, args, kwargs or {})

    def _higher_order(self, func: Operator, args: Arguments, kwargs: Keywords) -> object:
        """Run an operator that has other operators as arguments."""
        if func.name() != "run_dtensor_rng_op":
            raise NotImplementedError(f"a dry device does not run torch's {func.name()}")
        _seed, _offset, inner, *given = args  # the state of the generator is only passed on
        with self:
            return inner(*given, **kwargs)

    def _dispatch(self, func: Operator, args: Arguments, kwargs: Keywords) -> object:
        given = tensors_in(*args, *kwargs.values())
        strange = [x for x in given if type(x) not in PLAIN]
        if is_fake_mode_active() or any(isinstance(x, FakeTensor) for x in strange):
            return self._device.run_kernel(func, args, kwargs)  # torch works out shapes
        if strange:
            return NotImplemented  # tensors inside a DTensor or its like come here by themselves
        dry = [x for x in given if is_meta(x)]
        asked = kwargs.get("device")
        if not dry and (asked is None or asked.type not in ("cuda", "meta")):
            return self._on_host(func, args, kwargs, given)
        if asked is not None and asked.type == "cuda":
            self._device.check_index(asked)
            kwargs = {**kwargs, "device": META}
        elif self._is_deferred(dry, given):
            return self._deferred(func, args, kwargs)
        return self._on_device(func, args, kwargs, operands=(dry, len(given)))

    def _on_host(
        self, func: Operator, args: Arguments, kwargs: Keywords, given: list[Tensor]
    ) -> object:
        device = self._device
        if kwargs.get("pin_memory"):
            made = func(*args, **{**kwargs, "pin_memory": False})
            if not isinstance(made, Tensor):
                return made
            if func.name() == "aten::empty.memory_format" and made.is_contiguous():
                made = untouched(made)
            return device.pin(made)
        if any(device.buffers.among(given)):
            op = _describe(func)
            if not op.is_silent:
                device.touch(op.name, given, _written(op, args, kwargs))
        return func(*args, **kwargs)

    def _is_deferred(self, dry: list[Tensor], given: list[Tensor]) -> bool:
        """Tell whether results belong on `meta` itself, which has no memory."""
        if self._device.thread.asked_meta:
            return True
        if dry:
            return all(map(self._device.storages.is_deferred, dry))
        default = default_device()
        return not given and default is not None and default.type == "meta"

    def _deferred(self, func: Operator, args: Arguments, kwargs: Keywords) -> object:
        out = self._device.run_kernel(func, args, kwargs)
        for x in tensors_in(out):
            self._device.storages.defer(x)
        return out

    def _on_device(
        self,
        func: Operator,
        args: Arguments,
        kwargs: Keywords,
        *,
        operands: tuple[list[Tensor], int],
    ) -> object:
        device, (dry, num_given) = self._device, operands
        op = _known.get(func)
        if op is None:
            op = _known[func] = _describe(func)
        device.follow_backward()
        if op.is_collective:
            return self._made(op, device.on_collective(func, args, kwargs))
        if 0 < len(dry) < num_given and not may_mix(func, args, is_meta):
            args, kwargs = _all_on_device(device, op.name, args, kwargs)
        if op.stand_in is not None:
            out = device.run_kernel(op.stand_in, (device, func, args, kwargs), {})
            if not isinstance(out, Again | NotImplementedType):
                device.remember(self._made(op, out))
                return out
            args = out.args if isinstance(out, Again) else args
        elif op.may_move:
            with self:
                return func.decompose(*args, **kwargs)
        repeats = op.repeats and 0 < len(dry) == num_given
        form = form_of(func, args, kwargs) if repeats else None
        return self._run(op, func, (args, kwargs), dry=dry, form=form)

    def _run(
        self,
        op: _Operator,
        func: Operator,
        given: tuple[Arguments, Keywords],
        *,
        dry: list[Tensor],
        form: Hashable,
    ) -> object:
        """Run an operator for its shapes and record its work."""
        device, (args, kwargs) = self._device, given
        seen = None if form is None else self._seen.get(form)
        if seen is None:
            out, cost = self._first(op, func, args, kwargs)
            if form is not None and (again := made_of(out, dry, cost)) is not None:
                self._seen[form] = again
        else:
            out, cost = seen.again(), seen.cost
        with device.at_one_place():
            if op.makes:
                self._made(op, out)
            if op.resizes:
                for x in dry:
                    device.storages.resized(x.untyped_storage(), op.name, device.thread.stream)
            if not op.is_silent:
                made = tensors_in(out) if op.makes else []
                wanted = [] if op.workspace is None else op.workspace(args, kwargs)
                meanwhile = self._buffers(op, wanted) if wanted else []
                _launch(device, op, (dry, _written(op, args, kwargs), made), cost)
                del meanwhile
            device.remember(out)
        return out

    def _first(
        self, op: _Operator, func: Operator, args: Arguments, kwargs: Keywords
    ) -> tuple[object, Cost]:
        """Let torch compute the shapes of the results, and count kernels and flops."""
        run = self._device.run_kernel
        out = run(func, args, kwargs)
        if op.is_silent:
            return out, Cost(0, 0)
        flops = 0 if op.flops is None else run(op.flops, args, {**kwargs, "out_val": out})
        return out, Cost(launches.num_kernels(func, args, kwargs), flops)

    def _buffers(self, op: _Operator, wanted: list[Buffer]) -> list[Tensor]:
        """Allocate temporary buffers of an operator, which live as long as the returned list."""
        buffers = [torch.empty(shape, dtype=dtype, device=META) for shape, dtype in wanted]
        self._made(op, buffers)
        return buffers

    def _made(self, op: _Operator, out: object) -> object:
        """Record tensors that an operator returns as memory of the device."""
        device = self._device
        for x in tensors_in(out):
            if type(x) in PLAIN and is_meta(x):
                device.storages.see(x, op.name, device.thread.stream)
        return out


def _written(op: _Operator, args: Arguments, kwargs: Keywords) -> list[Tensor]:
    return tensors_in(
        *(kwargs.get(x) if isinstance(x, str) else args[x : x + 1] for x in op.writes)
    )


def _launch(
    device: DeviceRecorder,
    op: _Operator,
    operands: tuple[list[Tensor], list[Tensor], list[Tensor]],
    cost: Cost,
) -> None:
    dry, written, made = operands
    find, num_bytes = device.storages.find, 0
    reads: list[int] = []
    writes: list[int] = []
    own = {id(x) for x in written}
    for x in (*written, *made):
        num_bytes += x.numel() * x.element_size()
        if (block := find(x)) is not None:
            writes.append(block.number)
    for index, x in enumerate(dry):
        if op.overwrites and id(x) in own:
            continue
        size = x.numel() * x.element_size()
        num_bytes += min(size, num_bytes) if op.gathers and not index else size
        if (block := find(x)) is not None:
            reads.append(block.number)
    if not num_bytes:
        return  # nothing is launched for nothing
    at, place, thread = device.where()
    device.trace.events.append(
        Launch(
            at=at,
            place=place,
            thread=thread,
            what=op.name,
            stream=device.thread.stream,
            num_kernels=cost.num_kernels,
            num_bytes=num_bytes,
            flops=cost.flops,
            reads=tuple(reads),
            writes=tuple(writes),
        )
    )


def _all_on_device(
    device: DeviceRecorder, name: str, args: Arguments, kwargs: Keywords
) -> tuple[Arguments, Keywords]:
    """Record a fault for operands on two devices, and return operands on the device alone."""
    given = tensors_in(*args, *kwargs.values())
    on_host = [x for x in given if not is_meta(x)]
    first = f"{str(on_host[0].dtype)[6:]}{list(on_host[0].shape)}"
    device.fault(f"{name}: {len(on_host)} of {len(given)} operands on the host, first {first}")

    def moved(x: Tensor) -> Tensor:
        return x if is_meta(x) else torch.empty_like(x, device=META)

    on_device: tuple[Arguments, Keywords] = tree_map_only(Tensor, moved, (args, kwargs))
    return on_device
