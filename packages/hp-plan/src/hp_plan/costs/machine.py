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
    """Between some devices.

    Attributes:
        bandwidth: Bytes per second that each of them sends.
        latency: Seconds of a message.
        between_nodes: Whether it leaves the node.
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
        layer_seconds: What a layer takes in forward however small its input is, and as much again
            in each half of backward, and where these are apart; not where kernels are priced one by
            one.
        launch_seconds: Seconds that the host takes to launch a kernel. 0: kernels are not priced
            one by one, but layers as products and `layer_seconds`.
        grouped_flops: The same as `flops` of products in groups, those of experts.
        attention_flops: The same of attention proper.
        compiled: Share of what kernels other than products launch and move that is left of them
            where `train.compile` fuses them.
        bandwidth: Bytes per second from a device to another of its node, in each direction.
        latency: Seconds of a message between them, one of many that are under way.
        node_size: Devices of a node.
        node_bandwidth: Bytes per second of each device to other nodes.
        node_latency: Seconds of a message to another node.
        cores: Devices that compute at the same time: fewer than ranks where they share cores. 0:
            all.
        context_memory: Bytes of a device that are taken before the first tensor.
        communicator_memory: Bytes that a rank's end of a communicator takes.
        peer_memory: Bytes more for each rank that it sends to or receives from one by one.
        fragmentation: Share of what tensors take that the allocator holds beside them.
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
        """Return the link of the group, of all these, whose ranks are farthest apart."""
        between = any(
            min(ranks) // self.node_size != max(ranks) // self.node_size for ranks in groups
        )
        return self.link_of(between=between)

    def link_of(self, *, between: bool) -> Link:
        """The link to other nodes, or within one."""
        if between:
            return Link(self.node_bandwidth, self.node_latency, between)
        return Link(self.bandwidth, self.latency, between)

    def with_values(self, **values: float | None) -> "Machine":
        """The same machine with the values that are not None."""
        given = {name: value for name, value in values.items() if value is not None}
        return replace(self, **given)  # type: ignore[arg-type]


def of_sheet(sheet: Sheet, reached: Mapping[str, float] = REACHED) -> Machine:
    """Return what programs reach of a data sheet."""
    flops = sheet.teraflops * 1e12
    return Machine(
        flops=reached["product"] * flops,
        grouped_flops=reached["grouped"] * flops,
        attention_flops=reached["attention"] * flops,
        launch_seconds=reached["launch seconds"],
        compiled=reached["compiled"],
        memory=sheet.gigabytes * 1e9,
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
        memory=8e9,
        memory_bandwidth=5e9,
        layer_seconds=5e-4,
        bandwidth=1e9,
        latency=1e-4,
        node_size=1024,
        node_bandwidth=1e9,
        node_latency=1e-4,
    ),
}
"""By name."""


def machine_named(device_name: str) -> Machine | None:
    """The machine of a GPU, by the name that its driver gives it; None where there is no sheet.

    >>> machine_named("NVIDIA H100 80GB HBM3") is MACHINES["h100"]
    True
    >>> machine_named("Tesla T4") is None
    True
    """
    name = sheet_named(device_name)
    return MACHINES[name] if name else None


def machine_found(device_name: str, *, memory: float, node_size: int) -> Machine:
    """The machine that a run finds itself on; a GPU without a sheet is taken for an H100.

    Args:
        device_name: What the GPU's driver calls it.
        memory: Bytes of the smallest device.
        node_size: Devices of a node.
    """
    machine = machine_named(device_name) or MACHINES["h100"]
    return machine.with_values(memory=memory, node_size=node_size)
