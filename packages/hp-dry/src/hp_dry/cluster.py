"""Cluster of a dry run: its GPUs, its classes of ranks, settings of its processes. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from hp_base.data_sheets import SHEETS

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_OFF = ("", "0")


@dataclass(frozen=True, slots=True)
class Gpu:
    """GPU of a cluster, and the number of GPUs of a machine.

    Attributes:
        name: Name of the GPU, as the driver reports it.
        memory_bytes: Bytes of memory that a process is given of one GPU.
        capability: Compute capability, major and minor.
        num_multiprocessors: Streaming multiprocessors (SMs) of one GPU.
        num_devices: GPUs that a process sees.
    """

    name: str = "NVIDIA H100 80GB HBM3"
    memory_bytes: int = int(SHEETS["h100"].gibibytes * 2**30)
    capability: tuple[int, int] = (9, 0)
    num_multiprocessors: int = 132
    num_devices: int = 8


@dataclass(frozen=True)
class Classes:
    """Classes of the ranks of a world, each with the rank that represents it.

    Attributes:
        members: Global ranks of each class, the representative among them, by the global rank of
            the representative.
        representative: Representative of each rank, by global rank.
    """

    members: Mapping[int, tuple[int, ...]]
    representative: tuple[int, ...]

    @classmethod
    def of(cls, members: Mapping[int, Sequence[int]] | None, *, world_size: int) -> Classes:
        """Make classes from a map of representatives to represented ranks.

        Args:
            members: Global rank of the representative -> global ranks of its class, with or without
                the representative itself. None: every rank represents itself.
            world_size: Number of ranks.

        Raises:
            ValueError: If not every rank of the world has exactly one representative.
        """
        given = {rank: (rank,) for rank in range(world_size)} if members is None else members
        found = {key: tuple(sorted({key, *ranks})) for key, ranks in sorted(given.items())}
        if sorted(chain.from_iterable(found.values())) != list(range(world_size)):
            raise ValueError(
                f"representatives ({dict(given)}) must stand for every rank below world_size "
                f"({world_size}) once"
            )
        by_rank = {rank: key for key, ranks in found.items() for rank in ranks}
        return cls(found, tuple(by_rank[rank] for rank in range(world_size)))

    def size(self, rank: int) -> int:
        """Count the ranks of the class of a representative."""
        return len(self.members[rank])


def keeps_launch_order(env: Mapping[str, str]) -> bool:
    """Tell whether NCCL runs operations of several communicators in the order of the host."""
    return env.get("NCCL_LAUNCH_ORDER_IMPLICIT", "0") not in _OFF


def loads_eagerly(env: Mapping[str, str]) -> bool:
    """Tell whether torch's kernels are loaded before anything is launched."""
    return env.get("CUDA_MODULE_LOADING", "").upper() == "EAGER"


def grows_segments(env: Mapping[str, str]) -> bool:
    """Tell whether torch's allocator uses expandable segments."""
    options = next((env[name] for name in _ALLOCATOR if name in env), "")
    values = dict(option.partition(":")[::2] for option in options.replace(" ", "").split(","))
    return values.get("expandable_segments", "").lower() == "true"
