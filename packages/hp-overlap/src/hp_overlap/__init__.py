"""Overlap of one microbatch's forward with another's backward, deadlock-free by construction."""

import warnings
from typing import TYPE_CHECKING

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

_RENAMED = {"HiddenReport": "OverlapReport", "hidden_communication": "overlap_report"}

if not TYPE_CHECKING:  # which would let any name pass

    def __getattr__(name: str) -> object:
        """Return what has another name since 0.1."""
        if name not in _RENAMED:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        warnings.warn(f"{name} is called {_RENAMED[name]}", DeprecationWarning, stacklevel=2)
        return globals()[_RENAMED[name]]
