"""What kind of GPU a dry run pretends to have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, and how many a machine has.

    Attributes:
        name: As the driver says it.
        memory_bytes: Of one GPU.
        capability: Compute capability, major and minor.
        num_multiprocessors: Of one GPU.
        num_devices: That a process sees.
    """

    name: str = "NVIDIA H100 80GB HBM3"
    memory_bytes: int = 80 * 2**30
    capability: tuple[int, int] = (9, 0)
    num_multiprocessors: int = 132
    num_devices: int = 8
