"""Schedules from their closed forms; compute steps only, `add_send_recv` adds the messages."""

from hp_schedule.generators.forward import forward_only
from hp_schedule.generators.gpipe import gpipe
from hp_schedule.generators.interleaved import interleaved_1f1b
from hp_schedule.generators.one_f_one_b import one_f_one_b

__all__ = ["forward_only", "gpipe", "interleaved_1f1b", "one_f_one_b"]
