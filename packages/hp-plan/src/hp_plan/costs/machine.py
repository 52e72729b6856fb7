"""Rates, links and memory of machines: given, taken from data sheets, or measured."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from hp_base.beside_tensors import GPU_MARGIN
from hp_base.data_sheets import REACHED, SHEETS, Sheet, sheet_named

_MAY_BE_ZERO = frozenset(
    (
        "layer_seconds",
        "grouped_flops",
        "attention_flops",
        "launch_seconds",
        "latency",
        "node_latency",
        "cores",
        "context_memory",
        "communicator_memory",
        "peer_memory",
        "fragmentation",
    )
)


class Link(NamedTuple):
    """A link between devices.

    Attributes:
        bandwidth: Bytes per second that each device sends.
        latency: Seconds of a message.
        between_nodes: Whether the link leaves the node.
    """

    bandwidth: float
    latency: float
    between_nodes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A cluster of equal devices. Rates are those that programs reach, in SI units.

    Attributes:
        flops: Floating-point operations per second of a matrix product.
        memory: Bytes per device.
        memory_bandwidth: Bytes per second of a device's memory.
        host_bandwidth: Bytes per second from a device to its host, and likewise back; PCIe 4.0 with
            16 lanes reaches 25 GB/s in pinned memory.
        layer_seconds: Fixed seconds of a layer in forward, and as many in each separate part of
            backward; used only if `launch_seconds` is 0.
        launch_seconds: Seconds that the host takes to launch a kernel. 0: layers are priced by
            their products and `layer_seconds`, not kernel by kernel.
        grouped_flops: `flops` of grouped products, those of experts; 0: as `flops`.
        attention_flops: `flops` of attention proper; 0: as `flops`.
        compiled: Share of the launches and bytes of kernels other than products that is left when
            `train.compile` fuses them.
        bandwidth: Bytes per second from a device to another of its node, in each direction.
        latency: Seconds of a message within a node, when many are under way.
        node_size: Number of devices of a node.
        node_bandwidth: Bytes per second of each device to other nodes.
        node_latency: Seconds of a message to another node.
        cores: Number of devices that compute at the same time, less than the number of ranks if
            these share cores; 0: all of them.
        context_memory: Bytes of a device that are in use before the first tensor.
        communicator_memory: Bytes of a communicator on each of its ranks.
        peer_memory: Further bytes for each rank that a rank sends to or receives from one by one.
        fragmentation: Bytes that the allocator reserves beside tensors, as a share of theirs.
    """

    flops: float
    memory: float
    memory_bandwidth: float
    host_bandwidth: float = 25e9
    layer_seconds: float = 0.0
    launch_seconds: float = 0.0
    grouped_flops: float = 0.0
    attention_flops: float = 0.0
    compiled: float = 1.0
    bandwidth: float
    latency: float
    node_size: int = 8
    node_bandwidth: float
    node_latency: float
    cores: int = 0
    context_memory: float = 0.0
    communicator_memory: float = 0.0
    peer_memory: float = 0.0
    fragmentation: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = int(field.name not in _MAY_BE_ZERO and field.name != "compiled")
            if not value >= least:
                raise ValueError(f"{field.name} ({value}) must be >= {least}")
            if value == math.inf or (field.type is int and value != int(value)):
                kind = "whole" if field.type is int else "finite"
                raise ValueError(f"{field.name} ({value}) must be a {kind} number")
        if self.compiled > 1:
            raise ValueError(f"compiled ({self.compiled}) must be a share, at most 1")

    def link(self, groups: Iterable[Sequence[int]]) -> Link:
        """Return the link of the group whose ranks are farthest apart."""
        between = any(
            min(ranks) // self.node_size != max(ranks) // self.node_size for ranks in groups
        )
        return self.link_of(between=between)

    def link_of(self, *, between: bool) -> Link:
        """Return the link to other nodes, or within one."""
        if between:
            return Link(self.node_bandwidth, self.node_latency, between)
        return Link(self.bandwidth, self.latency, between)

    def with_values(self, **values: float | None) -> "Machine":
        """Return the machine with the given values that are not None."""
        given = {name: value for name, value in values.items() if value is not None}
        return replace(self, **given)  # type: ignore[arg-type]


def of_sheet(sheet: Sheet, reached: Mapping[str, float] = REACHED) -> Machine:
    """Return a machine with the shares of a data sheet's rates that programs reach."""
    flops = sheet.teraflops * 1e12
    return Machine(
        flops=reached["product"] * flops,
        grouped_flops=reached["grouped"] * flops,
        attention_flops=reached["attention"] * flops,
        launch_seconds=reached["launch seconds"],
        compiled=reached["compiled"],
        memory=sheet.gibibytes * 2**30,
        memory_bandwidth=reached["memory"] * sheet.terabytes_per_second * 1e12,
        bandwidth=reached["link"] * sheet.link * 1e9,
        latency=2e-6,
        node_size=sheet.node_size,
        node_bandwidth=reached["node link"] * sheet.node_link * 1e9,
        node_latency=4e-6,
    ).with_values(**GPU_MARGIN)


MACHINES = {
    **{name: of_sheet(sheet) for name, sheet in SHEETS.items()},
    "cpu": Machine(
        flops=2e10,
        memory=8 * 2**30,
        memory_bandwidth=5e9,
        layer_seconds=5e-4,
        bandwidth=1e9,
        latency=1e-4,
        node_size=1024,
        node_bandwidth=1e9,
        node_latency=1e-4,
    ),
}
"""Known machines by name."""


def machine_named(device_name: str) -> Machine | None:
    """Return the machine of a GPU by its driver's name for it; None if it has no data sheet.

    >>> machine_named("NVIDIA H100 80GB HBM3") is MACHINES["h100"]
    True
    >>> machine_named("Tesla T4") is None
    True
    """
    name = sheet_named(device_name)
    return MACHINES[name] if name else None


def machine_found(device_name: str, *, memory: float, node_size: int) -> Machine:
    """Return the machine of a run; a GPU without a data sheet counts as an H100.

    Args:
        device_name: Driver's name for the GPU.
        memory: Bytes of the smallest device.
        node_size: Devices of a node.
    """
    machine = machine_named(device_name) or MACHINES["h100"]
    return machine.with_values(memory=memory, node_size=node_size)
