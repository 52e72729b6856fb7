"""Bringing rows to the ranks of their experts and back."""

from hp_expert.batch import LocalDispatcher
from hp_expert.dispatch.all_to_all import AllToAllDispatcher
from hp_expert.dispatch.bounded import (
    BoundedAllToAllDispatcher,
    BoundedState,
    BufferOverflowError,
    Mark,
    RunAhead,
    rows_per_pair,
)
from hp_expert.dispatch.cost import (
    DispatchBytes,
    deduplication_pays,
    dispatch_bytes,
    expected_rows_per_token,
)
from hp_expert.dispatch.deduplicated import SlotExchange
from hp_expert.dispatch.exchange_plan import ExchangeRead
from hp_expert.dispatch.protocol import Dispatcher, DispatchState, PreparesInTwo
from hp_expert.dispatch.tensor_sliced import SlicedState, TensorSlicedDispatcher
from hp_expert.dispatch.tensor_summed import TensorSummedDispatcher

__all__ = [
    "AllToAllDispatcher",
    "BoundedAllToAllDispatcher",
    "BoundedState",
    "BufferOverflowError",
    "DispatchBytes",
    "DispatchState",
    "Dispatcher",
    "ExchangeRead",
    "LocalDispatcher",
    "Mark",
    "PreparesInTwo",
    "RunAhead",
    "SlicedState",
    "SlotExchange",
    "TensorSlicedDispatcher",
    "TensorSummedDispatcher",
    "deduplication_pays",
    "dispatch_bytes",
    "expected_rows_per_token",
    "rows_per_pair",
]
