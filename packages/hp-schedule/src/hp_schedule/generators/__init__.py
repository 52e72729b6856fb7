"""Schedules from their closed forms; compute steps only, `add_send_recv` adds the messages."""

from hp_schedule.generators.building_blocks import v_half, v_min
from hp_schedule.generators.closed_form import ClosedForm
from hp_schedule.generators.dualpipe import dualpipe_v
from hp_schedule.generators.forms import GENERATORS, closed_form
from hp_schedule.generators.forward import forward_only
from hp_schedule.generators.gpipe import gpipe, looped_bfs
from hp_schedule.generators.interleaved import interleaved_1f1b
from hp_schedule.generators.one_f_one_b import one_f_one_b
from hp_schedule.generators.u_shape import u_shape
from hp_schedule.generators.zbv import zbv
from hp_schedule.generators.zero_bubble import (
    grouped_interleaved,
    interleaved_zero_bubble,
    zero_bubble,
)

__all__ = [
    "GENERATORS",
    "ClosedForm",
    "closed_form",
    "dualpipe_v",
    "forward_only",
    "gpipe",
    "grouped_interleaved",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "looped_bfs",
    "one_f_one_b",
    "u_shape",
    "v_half",
    "v_min",
    "zbv",
    "zero_bubble",
]
