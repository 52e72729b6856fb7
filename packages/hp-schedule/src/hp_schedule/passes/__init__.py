"""Passes: from one schedule to another."""

from hp_schedule.passes.communication import add_send_recv, drop_communication

__all__ = ["add_send_recv", "drop_communication"]
