"""What hardware does: rates, links and memory, given, taken from data sheets, or measured."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

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
        """What the ranks of a group have in common, of the group whose ranks are farthest apart."""
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


GPU_MARGIN: Mapping[str, float] = {
    "context_memory": 1.0e9,
    "communicator_memory": 0.2e9,
    "peer_memory": 0.47e9,
    "fragmentation": 0.05,
}
"""What a GPU gives to others than tensors, as others have measured it; docs/hp-train/plan.md.

Context: 1.06 GB beside torch's tensors on an H100 whose communicator has done nothing yet
(NVIDIA/nccl #1685). Communicators: 544 to 688 MB each on four A100 (NVIDIA/nccl #964), of which
NCCL leaves two parts of seven since 2.22, which connects what is used alone. Peers: 3.28 GB more
after the first all-to-all with seven of them (NVIDIA/nccl #1685). Fragmentation is assumed.
"""


PEAK_TERAFLOPS: dict[str, dict[str, float]] = {
    "A100": {"bfloat16": 312, "float32": 19.5, "float64": 19.5},
    "A800": {"bfloat16": 312, "float32": 19.5},
    "H100 NVL": {"bfloat16": 835, "float32": 60, "float64": 60},
    "H100 PCIe": {"bfloat16": 756, "float32": 51, "float64": 51},
    "H100": {"bfloat16": 989, "float32": 67, "float64": 67},
    "H800": {"bfloat16": 989},
    "H200 NVL": {"bfloat16": 835, "float32": 60, "float64": 60},
    "H200": {"bfloat16": 989, "float32": 67, "float64": 67},
    "H20": {"bfloat16": 148},
    "GH200": {"bfloat16": 989, "float32": 67, "float64": 67},
    "B200": {"bfloat16": 2250, "float32": 75},
    "GB200": {"bfloat16": 2500, "float32": 80},
    "T4": {"float32": 8.1, "float64": 0.254},
    "V100-SXM2": {"float32": 15.7, "float64": 7.8},
    "V100-SXM3": {"float32": 15.7, "float64": 7.8},
    "V100-PCIE": {"float32": 14.0, "float64": 7.0},
    "A10": {"bfloat16": 125, "float32": 31.2},
    "A40": {"bfloat16": 149.7, "float32": 37.4},
    "L4": {"bfloat16": 121, "float32": 30.3},
    "L40": {"bfloat16": 181, "float32": 90.5},
    "L40S": {"bfloat16": 362, "float32": 91.6},
    "GeForce RTX 3090": {"bfloat16": 71, "float32": 35.6},
    "GeForce RTX 4090": {"bfloat16": 165.2, "float32": 82.6},
    "GeForce RTX 5090": {"bfloat16": 209.5, "float32": 104.8},
}
"""Dense peaks of data sheets by words of CUDA's device name and by `train.dtype`.

float32 without TF32, which torch leaves off by default; float64 on tensor cores, where there are
such. What is not listed is not known: a T4 has no bf16.
"""


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Operations per second that a data sheet promises; None where that is not known.

    Of several entries the longest counts that is whole words of the name:

    >>> peak_flops("NVIDIA H100 80GB HBM3", "bfloat16"), peak_flops("NVIDIA H100 PCIe", "bfloat16")
    (989000000000000.0, 756000000000000.0)
    >>> peak_flops("Tesla T4", "bfloat16") is None
    True
    """
    words = f" {device_name.replace('-', ' ')} "
    fitting = [name for name in PEAK_TERAFLOPS if f" {name.replace('-', ' ')} " in words]
    if not fitting or " MIG " in words or " Laptop " in words:
        return None
    teraflops = PEAK_TERAFLOPS[max(fitting, key=len)].get(dtype)
    return None if teraflops is None else teraflops * 1e12


REACHED: Mapping[str, float] = {
    "product": 0.57,
    "grouped": 0.385,
    "attention": 0.69,
    "memory": 0.76,
    "link": 0.73,
    "node link": 0.70,
    "compiled": 0.40,
    "launch seconds": 5.0e-6,
}
"""What programs reach of data sheets, fitted to published steps by `bench_plan_published.py`.

Of the peak of products of matrices, of those of experts and of attention; of the bandwidth of
memory, counting each operand of a kernel once; of links within a node and between nodes. Of kernels
that are no products, the share that is left where they are fused. And the seconds in which a host
launches a kernel.
"""


class Sheet(NamedTuple):
    """What a data sheet says of a GPU and its usual links.

    Attributes:
        teraflops: Dense peak in bfloat16.
        gigabytes: Memory.
        terabytes_per_second: Bandwidth of that memory.
        link: Gigabytes per second to other GPUs of the node, in each direction.
        node_link: The same to other nodes.
        node_size: GPUs that such links connect.
    """

    teraflops: float
    gigabytes: float
    terabytes_per_second: float
    link: float = 450.0
    node_link: float = 50.0
    node_size: int = 8


_PEAKS = {
    name: values["bfloat16"] for name, values in PEAK_TERAFLOPS.items() if "bfloat16" in values
}

SHEETS: Mapping[str, Sheet] = {
    "a100": Sheet(_PEAKS["A100"], 80, 2.0, link=300, node_link=25),
    "h100": Sheet(_PEAKS["H100"], 80, 3.35),
    "h100-96gb": Sheet(0.8 * _PEAKS["H100"], 96, 2.4),
    "h200": Sheet(_PEAKS["H200"], 141, 4.8),
    "b200": Sheet(_PEAKS["B200"], 180, 7.7, link=900),
    "gb200": Sheet(_PEAKS["GB200"], 186, 8.0, link=900, node_size=72),
}
"""SXM variants. The H100 with 96 GB of HBM2e draws 500 W, not 700: 0.8 of the peak is assumed."""


def of_sheet(sheet: Sheet, reached: Mapping[str, float] = REACHED) -> Machine:
    """What programs reach of a data sheet."""
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
    words = device_name.lower().replace("-", " ").split()
    return next((MACHINES[name] for name in SHEETS if name in words), None)


def machine_found(device_name: str, *, memory: float, node_size: int) -> Machine:
    """The machine that a run finds itself on; a GPU without a sheet is taken for an H100.

    Args:
        device_name: What the GPU's driver calls it.
        memory: Bytes of the smallest device.
        node_size: Devices of a node.
    """
    machine = machine_named(device_name) or MACHINES["h100"]
    return machine.with_values(memory=memory, node_size=node_size)
