"""A process group with injected latency and bandwidth, so that overlap shows on a CPU."""

from __future__ import annotations

from torch.distributed import ProcessGroup


def slow_group(group: ProcessGroup, *, latency: float = 0.0, bandwidth: float = float("inf")) -> ProcessGroup:
    """Placeholder."""
    raise NotImplementedError
