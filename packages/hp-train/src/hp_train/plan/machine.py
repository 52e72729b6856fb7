"""What hardware does: rates, links and memory, given, taken from data sheets, or measured."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple


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
        layer_seconds: What a layer takes in forward however small its input is.
        bandwidth: Bytes per second from a device to another of its node, in each direction.
        latency: Seconds of a message between them.
        node_size: Devices of a node.
        node_bandwidth: Bytes per second of each device to other nodes.
        node_latency: Seconds of a message to another node.
        cores: Devices that compute at the same time: fewer than ranks where they share cores. 0:
            all.
    """

    flops: float
    memory: float
    memory_bandwidth: float
    layer_seconds: float = 0.0
    bandwidth: float
    latency: float
    node_size: int = 8
    node_bandwidth: float
    node_latency: float
    cores: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("layer_seconds", "latency", "node_latency", "cores") else 1
            if not value >= least:
                raise ValueError(f"{field.name} ({value}) must be >= {least}")

    def link(self, groups: Iterable[Sequence[int]]) -> Link:
        """What the ranks of a group have in common, of the group whose ranks are farthest apart."""
        between = any(
            min(ranks) // self.node_size != max(ranks) // self.node_size for ranks in groups
        )
        if between:
            return Link(self.node_bandwidth, self.node_latency, between)
        return Link(self.bandwidth, self.latency, between)

    def with_values(self, **values: float | None) -> "Machine":
        """The same machine with the values that are not None."""
        given = {name: value for name, value in values.items() if value is not None}
        return replace(self, **given)  # type: ignore[arg-type]


def _gpu(*, teraflops: float, gigabytes: float, terabytes_per_second: float) -> Machine:
    """Half of the dense bf16 rate of the data sheet; NVLink; 400 Gb/s per device between nodes."""
    return Machine(
        flops=0.5 * teraflops * 1e12,
        memory=gigabytes * 1e9,
        memory_bandwidth=0.8 * terabytes_per_second * 1e12,
        layer_seconds=2e-4,
        bandwidth=0.8 * 450e9,
        latency=1e-5,
        node_bandwidth=0.8 * 50e9,
        node_latency=2e-5,
    )


MACHINES = {
    "a100": _gpu(teraflops=312, gigabytes=80, terabytes_per_second=2.0).with_values(
        bandwidth=0.8 * 300e9, node_bandwidth=0.8 * 25e9
    ),
    "h100": _gpu(teraflops=989, gigabytes=80, terabytes_per_second=3.35),
    "h200": _gpu(teraflops=989, gigabytes=141, terabytes_per_second=4.8),
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
"""By name. Of GPUs: data sheets of the SXM variants, times what programs usually reach."""
