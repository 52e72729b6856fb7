"""Overlap of one microbatch's forward with another's backward, deadlock-free by construction.

A name loads its module when it is first used: reports of traces need no torch.
"""

from typing import TYPE_CHECKING

from hp_base.lazy import lazily

if TYPE_CHECKING:
    from hp_overlap.coordinator import (
        HookCoordinator,
        OverlapAbortedError,
        OverlapTimeoutError,
        TraceEntry,
    )
    from hp_overlap.overlap import CommComputeOverlap
    from hp_overlap.report import OverlapReport, Transfer, overlap_report

__all__ = [
    "CommComputeOverlap",
    "HookCoordinator",
    "OverlapAbortedError",
    "OverlapReport",
    "OverlapTimeoutError",
    "TraceEntry",
    "Transfer",
    "__version__",
    "overlap_report",
]
__version__ = "0.1.0"

__getattr__, __dir__ = lazily(
    __name__,
    {
        "CommComputeOverlap": "hp_overlap.overlap",
        "HookCoordinator": "hp_overlap.coordinator",
        "OverlapAbortedError": "hp_overlap.coordinator",
        "OverlapReport": "hp_overlap.report",
        "OverlapTimeoutError": "hp_overlap.coordinator",
        "TraceEntry": "hp_overlap.coordinator",
        "Transfer": "hp_overlap.report",
        "overlap_report": "hp_overlap.report",
    },
)
