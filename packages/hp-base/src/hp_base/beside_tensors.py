"""Memory of a GPU besides tensors: context, communicators of NCCL, peers. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

GPU_MARGIN: Mapping[str, float] = {
    "context_memory": 1.0e9,
    "communicator_memory": 0.2e9,
    "peer_memory": 0.47e9,
    "fragmentation": 0.05,
}
"""Memory of a GPU that holds no tensors, as others measured it; docs/how-to/plan-a-layout.md.

Context: 0.99 GiB beside torch's tensors on an H100 whose communicator has done nothing yet
(NVIDIA/nccl #1685). Communicators: 519 to 656 MiB each on four A100 (NVIDIA/nccl #964); since 2.22
NCCL uses two sevenths of it, as it connects peers when they are first used. Peers: 3.05 GiB more
after the first all-to-all with seven of them (NVIDIA/nccl #1685). Fragmentation is assumed.
"""


class Held(NamedTuple):
    """Communicators and buffers of NCCL that a rank holds while a run lasts.

    Attributes:
        communicators: Number of communicators of more than one rank that NCCL has connected: the
            default one, since it is given its device, and all others of a run, which sum a number
            when they are made.
        peers: Number of ranks that it sends to or receives from one by one, in exchanges and along
            edges of the pipeline, counted in each communicator; ranks on other nodes share a buffer
            and count as one.
    """

    communicators: int
    peers: int

    @classmethod
    def of(cls, rank: int, exchanges: Iterable[Sequence[int]], *, node_size: int) -> Held:
        """Count the communicators and buffers of a rank.

        Args:
            rank: Global rank.
            exchanges: For each communicator of the rank, the ranks that it sends to or receives
                from one by one, perhaps with itself.
            node_size: Number of devices of a node.
        """
        numbers = [_num_peers(rank, ranks, node_size) for ranks in exchanges]
        return cls(len(numbers), sum(numbers))

    def in_bytes(self) -> dict[str, int]:
        """Return the bytes of a GPU besides tensors, by their use."""
        return {
            "context": int(GPU_MARGIN["context_memory"]),
            "communicators": int(self.communicators * GPU_MARGIN["communicator_memory"]),
            "peer buffers": int(self.peers * GPU_MARGIN["peer_memory"]),
        }


def _num_peers(rank: int, ranks: Sequence[int], node_size: int) -> int:
    others = {*ranks} - {rank}
    here = sum(other // node_size == rank // node_size for other in others)
    return here + int(here < len(others))
