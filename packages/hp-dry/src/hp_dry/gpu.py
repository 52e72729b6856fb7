"""The kind of GPU that a dry run pretends to have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, and how many a machine has.

    Attributes:
        name: Name of the GPU, as the driver reports it.
        memory_bytes: Bytes of memory of one GPU.
        capability: Compute capability, major and minor.
        num_multiprocessors: Streaming multiprocessors (SMs) of one GPU.
        num_devices: GPUs that a process sees.
    """

    name: str = "NVIDIA H100 80GB HBM3"
    memory_bytes: int = 80 * 2**30
    capability: tuple[int, int] = (9, 0)
    num_multiprocessors: int = 132
    num_devices: int = 8
