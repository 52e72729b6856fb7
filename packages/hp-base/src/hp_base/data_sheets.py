"""Rates of GPUs in data sheets, and the part of them that programs reach."""

from collections.abc import Mapping
from typing import NamedTuple

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

float32 is without TF32, which torch leaves off by default; float64 is on tensor cores, if a GPU has
those. Missing entries are unknown, or do not exist: a T4 has no bf16.
"""


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the operations per second in a data sheet; None where they are unknown.

    The longest entry counts whose words are all in the name:

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
"""Rates of programs as parts of data sheets, fitted to published steps (`bench_plan_published.py`).

Parts of the peak for products of matrices, grouped products of experts, and attention; parts of the
bandwidth of memory, where each operand of a kernel counts once, of links within a node and between
nodes; the part of the time of other kernels that is left where they are fused; and the seconds in
which a host launches a kernel.
"""


class Sheet(NamedTuple):
    """Rates of a GPU and its usual links, by its data sheet.

    Attributes:
        teraflops: Dense peak in bfloat16.
        gibibytes: Memory that a program is given: 0.989 of the number in the name of the GPU, as of
            an H100, whose 80 GB are 79.11 GiB for torch (vllm-project/vllm #27508).
        terabytes_per_second: Bandwidth of the memory.
        link: Gigabytes per second to other GPUs of the node, in each direction.
        node_link: Gigabytes per second to other nodes, in each direction.
        node_size: Number of GPUs that the links of a node connect.
    """

    teraflops: float
    gibibytes: float
    terabytes_per_second: float
    link: float = 450.0
    node_link: float = 50.0
    node_size: int = 8


_PEAKS = {
    name: values["bfloat16"] for name, values in PEAK_TERAFLOPS.items() if "bfloat16" in values
}

SHEETS: Mapping[str, Sheet] = {
    "a100": Sheet(_PEAKS["A100"], 79.1, 2.0, link=300, node_link=25),
    "h100": Sheet(_PEAKS["H100"], 79.1, 3.35),
    "h100-96gb": Sheet(0.8 * _PEAKS["H100"], 94.9, 2.4),
    "h200": Sheet(_PEAKS["H200"], 139.4, 4.8),
    "b200": Sheet(_PEAKS["B200"], 178.0, 7.7, link=900),
    "gb200": Sheet(_PEAKS["GB200"], 183.9, 8.0, link=900, node_size=72),
}
"""SXM variants. The H100 with 96 GB of HBM2e draws 500 W, not 700: 0.8 of the peak is assumed."""


def sheet_named(device_name: str) -> str | None:
    """Return the key of `SHEETS` for a GPU, by the name that its driver gives it.

    >>> sheet_named("NVIDIA H100 80GB HBM3")
    'h100'
    >>> sheet_named("Tesla T4") is None
    True
    """
    words = device_name.lower().replace("-", " ").split()
    return next((name for name in SHEETS if name in words), None)
