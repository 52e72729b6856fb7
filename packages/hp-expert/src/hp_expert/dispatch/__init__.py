"""Bringing rows to the ranks of their experts and back."""

from hp_expert.dispatch.all_to_all import AllToAllDispatcher
from hp_expert.dispatch.cost import (
    DispatchBytes,
    deduplication_pays,
    dispatch_bytes,
    expected_rows_per_token,
)
from hp_expert.dispatch.local import LocalDispatcher
from hp_expert.dispatch.protocol import Dispatcher, DispatchState

__all__ = [
    "AllToAllDispatcher",
    "DispatchBytes",
    "DispatchState",
    "Dispatcher",
    "LocalDispatcher",
    "deduplication_pays",
    "dispatch_bytes",
    "expected_rows_per_token",
]
