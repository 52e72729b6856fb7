"""Passes: from one schedule to another."""

from hp_schedule.passes.alignment import auto_align_and_add_send_recv
from hp_schedule.passes.communication import add_send_recv, drop_communication
from hp_schedule.passes.fsdp import add_fsdp_reduce_grad, add_fsdp_unshard_reshard
from hp_schedule.passes.overlap import pair_overlap
from hp_schedule.passes.retention import (
    Retention,
    add_offload,
    add_recompute,
    drop_retention,
)

__all__ = [
    "Retention",
    "add_fsdp_reduce_grad",
    "add_fsdp_unshard_reshard",
    "add_offload",
    "add_recompute",
    "add_send_recv",
    "auto_align_and_add_send_recv",
    "drop_communication",
    "drop_retention",
    "pair_overlap",
]
