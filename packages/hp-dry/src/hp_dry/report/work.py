"""Work of the device of a rank: launches, bytes, products and waits of the host. No torch."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from hp_base.data_sheets import REACHED, SHEETS, sheet_named
from hp_dry.report.sites import Site, site
from hp_dry.trace import Allocate, Collective, Event, HostWait, Launch, Trace

_Key = TypeVar("_Key", str, int)


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Launches, bytes, products and waits of a part of a run.

    Attributes:
        launches: Kernels, copies and fills of device memory.
        bytes: Bytes that they read and write, every operand counted once.
        flops: Operations of matrix products, a multiplication and its addition counted as two.
        host_waits: Times that the host waited for the device.
    """

    launches: int = 0
    bytes: int = 0
    flops: int = 0
    host_waits: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            launches=self.launches + other.launches,
            bytes=self.bytes + other.bytes,
            flops=self.flops + other.flops,
            host_waits=self.host_waits + other.host_waits,
        )


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a step and its cost.

    Attributes:
        phase: Phase of the step: `"forward"`, `"backward"`, `"optimizer"` and such.
        microbatch: Index of the microbatch; -1 outside of one.
        layer: Name of the layer, such as `"layers.3"`; empty outside of one.
        cost: Cost of this part.
    """

    phase: str
    microbatch: int
    layer: str
    cost: Cost


class Rates(Protocol):
    """Rates that programs reach on a machine."""

    @property
    def flops(self) -> float:
        """Return operations per second of matrix products."""

    @property
    def memory_bandwidth(self) -> float:
        """Return bytes per second of a device's memory."""

    @property
    def launch_seconds(self) -> float:
        """Return the seconds in which a host launches a kernel."""


class GpuRates(NamedTuple):
    """`Rates` of a GPU with a data sheet."""

    flops: float
    memory_bandwidth: float
    launch_seconds: float


def rates_of(device_name: str) -> GpuRates | None:
    """Return the rates that programs reach on a GPU; None without a data sheet of it.

    Args:
        device_name: Name of the GPU, as its driver reports it.
    """
    name = sheet_named(device_name)
    if name is None:
        return None
    sheet = SHEETS[name]
    return GpuRates(
        REACHED["product"] * sheet.teraflops * 1e12,
        REACHED["memory"] * sheet.terabytes_per_second * 1e12,
        REACHED["launch seconds"],
    )


class Pace(NamedTuple):
    """Seconds of a step by the rates of a machine, without exchanges.

    Attributes:
        host: Seconds in which the host launches kernels.
        device: Least seconds in which the device computes.
    """

    host: float
    device: float

    @property
    def host_binds(self) -> bool:
        """Tell whether the device waits for the host to launch."""
        return self.host > self.device


class WaitLine(msgspec.Struct, frozen=True, kw_only=True):
    """Line at which the host waits for the device.

    Attributes:
        at: Line that waits, and the lines that called it.
        what: Function that the host called, such as `"copy to host"`.
        count: Number of its waits in the step.
        bytes: Bytes that it copies to the host.
        layers: Number of layers in which it waits.
        microbatches: Number of microbatches in which it waits.
    """

    at: str
    what: str
    count: int
    bytes: int
    layers: int
    microbatches: int


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of one step of a rank: the last one of the trace.

    Attributes:
        step: Number of the step; -1 if the trace has no step, and everything in it is counted.
        total: Cost of the whole step.
        before: Cost of the run before the first step.
        cells: Parts of the step by phase, microbatch and layer, in the order of their beginning.
        waits: Lines at which the host waits, most frequent first.
    """

    step: int
    total: Cost
    before: Cost
    cells: tuple[Cell, ...]
    waits: tuple[WaitLine, ...]

    def pace(self, machine: Rates) -> Pace:
        """Return the seconds of host and device, added over the parts of the step.

        Args:
            machine: Rates of the machine.
        """
        device = sum(
            max(cell.cost.flops / machine.flops, cell.cost.bytes / machine.memory_bandwidth)
            for cell in self.cells
        )
        return Pace(self.total.launches * machine.launch_seconds, device)

    def by_layer(self) -> dict[str, Cost]:
        """Sum costs over all microbatches and phases, by layer; `""` is outside of layers."""
        return _sums((cell.layer, cell.cost) for cell in self.cells)

    def by_microbatch(self) -> dict[int, Cost]:
        """Sum costs over all layers and phases, by microbatch; -1 is outside of microbatches."""
        return dict(sorted(_sums((cell.microbatch, cell.cost) for cell in self.cells).items()))

    def by_phase(self) -> dict[str, Cost]:
        """Sum costs over all layers and microbatches, by phase."""
        return _sums((cell.phase, cell.cost) for cell in self.cells)


def work_of(trace: Trace) -> Work:
    """Count the work of the device in a trace."""
    step = max((site(event.place).step for event in trace.events), default=-1)
    costs: defaultdict[tuple[str, int, str], Counter[str]] = defaultdict(Counter)
    before: Counter[str] = Counter()
    waits: defaultdict[tuple[str, str], list[tuple[HostWait, str]]] = defaultdict(list)
    for event, where, layer in _placed(trace):
        if where.step < 0 <= step:
            _count(before, event)
        elif where.step == step:
            _count(costs[where.phase, where.microbatch, layer], event)
            if isinstance(event, HostWait):
                waits[event.at, event.what].append((event, layer))
    cells = tuple(
        Cell(phase=phase, microbatch=microbatch, layer=layer, cost=Cost(**counts))
        for (phase, microbatch, layer), counts in costs.items()
    )
    return Work(
        step=step,
        total=sum((cell.cost for cell in cells), Cost()),
        before=Cost(**before),
        cells=cells,
        waits=tuple(sorted(_lines(waits), key=lambda each: (-each.count, each.at))),
    )


def _placed(trace: Trace) -> Iterator[tuple[Event, Site, str]]:
    """Yield the launches and waits with their place and their layer."""
    layers = _Layers()
    for event in trace.events:
        where = site(event.place)
        if isinstance(event, Allocate):
            layers.made(event, where)
        elif isinstance(event, (Launch, Collective)):
            layer = layers.of(event, where)
            if isinstance(event, Launch):
                yield event, where, layer
        elif isinstance(event, HostWait):
            yield event, where, where.layer


class _Layers:
    """Layers of the operations of a backward, which run outside of modules.

    The layer follows from the blocks that an operation reads: of the blocks from forward, the
        newest
    belongs to the current layer, and so do the blocks that the operation writes. An operation that
    reads only the input of a layer, and none of its other blocks, counts for the layer before.
    """

    def __init__(self) -> None:
        self._forward: dict[int, str] = {}
        self._backward: dict[int, str] = {}

    def made(self, event: Allocate, where: Site) -> None:
        """Record the layer that made a block."""
        if where.phase == "forward" or where.layer:
            self._forward[event.block] = where.layer

    def of(self, event: Launch | Collective, where: Site) -> str:
        """Return the layer of an operation, `""` outside of layers."""
        if where.layer or where.phase not in {"backward", "overlapped"}:
            return where.layer
        kept = self._forward if any(x in self._forward for x in event.reads) else self._backward
        layer = kept.get(max((x for x in event.reads if x in kept), default=-1), "")
        if layer:
            for block in event.writes:
                if block not in self._forward:
                    self._backward[block] = layer
        return layer


def _count(counts: Counter[str], event: Event) -> None:
    if isinstance(event, Launch):
        counts["launches"] += event.num_kernels
        counts["bytes"] += event.num_bytes
        counts["flops"] += event.flops
    elif isinstance(event, HostWait):
        counts["host_waits"] += 1


def _lines(
    waits: dict[tuple[str, str], list[tuple[HostWait, str]]],
) -> Iterator[WaitLine]:
    for (at, what), events in waits.items():
        yield WaitLine(
            at=at,
            what=what,
            count=len(events),
            bytes=sum(event.num_bytes for event, _ in events),
            layers=len({layer for _, layer in events} - {""}),
            microbatches=len({site(event.place).microbatch for event, _ in events} - {-1}),
        )


def _sums(costs: Iterable[tuple[_Key, Cost]]) -> dict[_Key, Cost]:
    found: dict[_Key, Cost] = {}
    for key, cost in costs:
        found[key] = found.get(key, Cost()) + cost
    return found
