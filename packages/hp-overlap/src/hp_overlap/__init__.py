"""Overlap of one microbatch's forward with another's backward, deadlock-free by construction."""

from hp_overlap.coordinator import (
    HookCoordinator,
    OverlapAbortedError,
    OverlapTimeoutError,
    TraceEntry,
)
from hp_overlap.overlap import CommComputeOverlap

__all__ = [
    "CommComputeOverlap",
    "HookCoordinator",
    "OverlapAbortedError",
    "OverlapTimeoutError",
    "TraceEntry",
    "__version__",
]
__version__ = "0.1.0"
