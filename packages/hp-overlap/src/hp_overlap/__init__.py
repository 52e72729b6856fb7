"""Overlap of one microbatch's forward with another's backward, deadlock-free by construction."""

from hp_overlap.coordinator import (
    HookCoordinator,
    OverlapAbortedError,
    OverlapTimeoutError,
    TraceEntry,
)
from hp_overlap.hidden import HiddenReport, Transfer, hidden_communication
from hp_overlap.overlap import CommComputeOverlap

__all__ = [
    "CommComputeOverlap",
    "HiddenReport",
    "HookCoordinator",
    "OverlapAbortedError",
    "OverlapTimeoutError",
    "TraceEntry",
    "Transfer",
    "__version__",
    "hidden_communication",
]
__version__ = "0.1.0"
