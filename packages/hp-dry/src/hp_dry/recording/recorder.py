"""Recorder of one rank, which writes the use of its device into a trace: `DeviceRecorder`."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, cycle
from typing import TypeAlias, TypeVar
from weakref import WeakSet

import torch
from msgspec.structs import replace
from torch import Tensor

from hp_dry._internals import Arguments, Keywords, Operator, is_meta
from hp_dry.cluster import Gpu
from hp_dry.recording import sites
from hp_dry.recording.backward import Backward, Origin
from hp_dry.recording.tensors import Buffers, Storages, shapes_of, tensors_in
from hp_dry.trace import (
    Collective,
    Event,
    Fault,
    HostAccess,
    Label,
    Launch,
    RecordEvent,
    Trace,
    WaitEvent,
)
from hp_platform.threads import current_place

T = TypeVar("T")
OnCollective: TypeAlias = Callable[[Operator, Arguments, Keywords], object]
_GROUP_STREAMS = 1000
_POOL = 32
"""Streams of one priority that torch hands out before it begins again."""
_pinned: WeakSet[torch.UntypedStorage] = WeakSet()  # storages of a program may outlive a device
_active: list[DeviceRecorder] = []
"""Recorder of the device that this process is inside of; at most one."""


class _Thread(threading.local):
    """Thread-local state of a thread of the host."""

    stream = 0  # current one
    index = 0  # index of the current device
    in_kernel = 0  # nesting of torch's own kernels in Python, which see `meta`
    asked_meta = False
    at: tuple[str, str, int] | None = None  # set while an operator is recorded

    def __init__(self, numbers: Iterator[int]) -> None:
        self.number = next(numbers)
        self.backward = Backward()


class DeviceRecorder:
    """Recorder of the operators, memory and waits of one rank on its device.

    Attributes:
        trace: Events so far.
        gpu: The kind of GPU that the device pretends to be.
        local_rank: Local rank: position among the ranks of a machine.
        index: Index of the device on its machine, as in `cuda:0`.
        on_collective: Function called for every operator of `c10d` and of functional collectives
            whose tensors are on the device, with the operator, its positional and its keyword
            arguments; returns the result of the operator.
        storages: Storages that are memory of the device.
        buffers: Storages on the host that asynchronous copies read or write.
    """

    def __init__(self, rank: int, world_size: int, *, gpu: Gpu, local_rank: int) -> None:
        """Begin a trace.

        Args:
            rank: Global rank.
            world_size: Number of ranks.
            gpu: Kind of GPU that the device pretends to be.
            local_rank: Local rank: position among the ranks of a machine.
        """
        self.trace = Trace(rank, world_size)
        self.gpu = gpu
        self.local_rank, self.index = local_rank, 0
        self.thread = _Thread(count())
        self.buffers = Buffers()
        self.storages = Storages(self.emit)
        self.on_collective: OnCollective = self._without_others
        self._events, self._works = count(1), count(1)
        self._pools = cycle(range(1, 1 + _POOL)), cycle(range(1 + _POOL, 1 + 2 * _POOL))
        self._group_streams: dict[str, int] = {}

    @property
    def device(self) -> torch.device:
        """Return the device that tensors name."""
        return torch.device("cuda", self.index)

    def current_stream(self) -> int:
        """Return the number of the current stream of this thread."""
        self.follow_backward()
        return self.thread.stream

    def stream_of_group(self, name: str) -> int:
        """Return the number of the stream of a communicator."""
        return self._group_streams.setdefault(name, _GROUP_STREAMS + len(self._group_streams))

    def new_event(self) -> int:
        """Return a number for an event."""
        return next(self._events)

    def next_in_pool(self, *, is_high: bool) -> int:
        """Return the number of the next stream of a priority."""
        return next(self._pools[is_high])

    def new_work(self) -> int:
        """Return a number for an operation between ranks."""
        return next(self._works)

    def block_of(self, x: Tensor) -> int:
        """Return the number of the block of a tensor on the device; -1 if it has none."""
        block = self.storages.find(x)
        return -1 if block is None else block.number

    def see(self, x: Tensor, what: str) -> int:
        """Return the block of a tensor on the device, allocated now by `what` if it is unknown."""
        return self.storages.see(x, what, self.thread.stream)

    def run_kernel(self, func: Callable[..., T], args: Arguments, kwargs: Keywords) -> T:
        """Call an operator while tensors report `meta`, as torch's own code in Python expects."""
        thread = self.thread
        thread.in_kernel += 1
        try:
            return func(*args, **kwargs)
        finally:
            thread.in_kernel -= 1

    def label(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Label the memory of tensors on the device with one of `trace.KINDS`."""
        for x in tensors:
            local = x.to_local() if hasattr(x, "to_local") else x  # of a DTensor
            if (number := self.block_of(local)) >= 0:
                self.emit(Label(block=number, kind=kind))

    def emit(self, event: Event) -> None:
        """Append an event, with the current line, place and thread unless it has its own."""
        at, place, thread = self.where()
        self.trace.events.append(
            replace(
                event,
                at=event.at or at,
                place=event.place or place,
                thread=event.thread or thread,
            )
        )

    def touch(self, what: str, tensors: Sequence[Tensor], written: Sequence[Tensor] = ()) -> None:
        """Record that the host reads or writes buffers of asynchronous copies."""
        for number, x in self.buffers.among(tensors):
            writes = any(x is each for each in written)
            self.emit(HostAccess(what=what, buffer=number, writes=writes))

    def fault(self, what: str) -> None:
        """Record an operation that the device would refuse."""
        self.emit(Fault(what=what))

    def use_index(self, index: int) -> None:
        """Make another device of this machine the current device of this thread."""
        if index >= self.gpu.num_devices or index < 0:
            raise RuntimeError(
                f"device index ({index}) must be below num_devices ({self.gpu.num_devices})"
            )
        self.thread.index = index
        if not self.storages.num_allocations:
            self.index = index

    def check_index(self, asked: torch.device) -> None:
        """Record a fault for memory on a device that is not the device of this rank."""
        index = self.thread.index if asked.index is None else asked.index
        if index != self.index and not self.storages.num_allocations:
            self.index = index
        if index != self.index:
            self.fault(f"memory on cuda:{index} of a rank whose device is cuda:{self.index}")

    def pin(self, x: Tensor) -> Tensor:
        """Record that a tensor on the host is in pinned memory."""
        _pinned.add(x.untyped_storage())
        return x

    def is_pinned(self, x: Tensor) -> bool:
        """Tell whether a tensor is on the host, in pinned memory."""
        return not is_meta(x) and x.untyped_storage() in _pinned

    def note_kernel(
        self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], variant: str
    ) -> None:
        """Record a kernel that is not torch's, or the kernel of a composed operator."""
        if not all(map(is_meta, (*reads, *writes))):
            self.fault(f"{name}: some operands are on the host")
        self.emit(
            Launch(
                what=name,
                stream=self.current_stream(),
                num_kernels=1,
                num_bytes=sum(x.numel() * x.element_size() for x in (*reads, *writes)),
                flops=0,
                reads=tuple(map(self.block_of, reads)),
                writes=tuple(map(self.block_of, writes)),
                variant="" if name.startswith("aten.") else f"{name} {variant}".rstrip(),
            )
        )

    def follow_backward(self) -> None:
        """Make the stream of the autograd engine current in this thread; see `backward`."""
        before = self.thread.stream
        stream = self.thread.backward.follow(before)
        if stream != before:
            event = self.new_event()
            self.emit(RecordEvent(event=event, stream=before))
            self.emit(WaitEvent(event=event, stream=stream))
            self.thread.stream = stream

    def remember(self, out: object) -> None:
        """Store the origin of an operator for the operators that compute its gradient."""
        if made := tensors_in(out):
            at, place, _ = self.where()
            self.thread.backward.remember(made, Origin(at, place, self.thread.stream))

    def where(self) -> tuple[str, str, int]:
        """Return the current line, place and thread."""
        if self.thread.at is not None:
            return self.thread.at
        at, by_engine = sites.here()
        place, origin = current_place(), self.thread.backward.origin
        if by_engine and origin is not None:
            at = f"{origin.at} < {at}"
            place = sites.backward_place(place, origin.place)
        return at, place, self.thread.number

    @contextmanager
    def at_one_place(self) -> Iterator[None]:
        """Look up line, place and thread once for all events inside the context."""
        self.thread.at = self.where()
        try:
            yield
        finally:
            self.thread.at = None

    @contextmanager
    def asked_for_meta(self) -> Iterator[None]:
        """Let tensors that are made inside the context be deferred, on `meta` without memory."""
        before, self.thread.asked_meta = self.thread.asked_meta, True
        try:
            yield
        finally:
            self.thread.asked_meta = before

    def _without_others(self, func: Operator, args: Arguments, kwargs: Keywords) -> object:
        """Run torch's own kernels for `meta`, as long as there is no world of other ranks.

        The operation is recorded; it changes nothing, since there is no other rank.
        """
        importlib.import_module("torch.distributed._tools.fake_collectives")
        if "wait_tensor" in func.name():
            return args[0]
        tensors = tensors_in(*args, *kwargs.values())
        blocks = tuple(map(self.block_of, tensors))
        out = self.run_kernel(func, args, kwargs)
        self.emit(
            Collective(
                op=func.name().split("::")[1].split(".")[0],
                group="",
                issuer=self.current_stream(),
                stream=self.stream_of_group(""),
                inputs=shapes_of(tensors),
                outputs=(),
                reads=blocks,
                writes=(),
                work=self.new_work(),
            )
        )
        return out


@contextmanager
def recording_by(recorder: DeviceRecorder) -> Iterator[None]:
    """Make a recorder `active()` inside the context.

    Raises:
        RuntimeError: If another recorder is active.
    """
    if _active:
        raise RuntimeError("this process is inside a DryDevice already")
    _active.append(recorder)
    try:
        yield
    finally:
        _active.remove(recorder)


def active() -> DeviceRecorder:
    """Return the recorder of the device that this process is inside of.

    Raises:
        RuntimeError: If there is none, because a stream or an event has outlived its device.
    """
    if not _active:
        raise RuntimeError("a stream or an event of a DryDevice is used outside of one")
    return _active[0]
