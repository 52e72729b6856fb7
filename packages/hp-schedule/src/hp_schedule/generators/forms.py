"""From a generator to the rule of its rows."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from hp_schedule.generators.building_blocks import v_half, v_half_form, v_min, v_min_form
from hp_schedule.generators.closed_form import ClosedForm
from hp_schedule.generators.dualpipe import dualpipe_v, dualpipe_v_form
from hp_schedule.generators.forward import forward_only, forward_only_form
from hp_schedule.generators.gpipe import gpipe, gpipe_form, looped_bfs, looped_bfs_form
from hp_schedule.generators.interleaved import interleaved_1f1b, interleaved_1f1b_form
from hp_schedule.generators.one_f_one_b import one_f_one_b, one_f_one_b_form
from hp_schedule.generators.u_shape import u_shape, u_shape_form
from hp_schedule.generators.zbv import zbv, zbv_form
from hp_schedule.generators.zero_bubble import (
    grouped_interleaved,
    grouped_interleaved_form,
    interleaved_zero_bubble,
    interleaved_zero_bubble_form,
    zero_bubble,
    zero_bubble_form,
)
from hp_schedule.schedule import Schedule

Generator = Callable[..., Schedule]

_FORMS: Final[Mapping[Generator, Callable[..., ClosedForm]]] = {
    dualpipe_v: dualpipe_v_form,
    forward_only: forward_only_form,
    gpipe: gpipe_form,
    grouped_interleaved: grouped_interleaved_form,
    interleaved_1f1b: interleaved_1f1b_form,
    interleaved_zero_bubble: interleaved_zero_bubble_form,
    looped_bfs: looped_bfs_form,
    one_f_one_b: one_f_one_b_form,
    u_shape: u_shape_form,
    v_half: v_half_form,
    v_min: v_min_form,
    zbv: zbv_form,
    zero_bubble: zero_bubble_form,
}

GENERATORS: Final[Mapping[str, Generator]] = {
    "1f1b": one_f_one_b,
    **{generator.__name__: generator for generator in _FORMS},
}
"""By the name of the function; 1F1B also as people write it."""


def closed_form(generator: Generator, num_ranks: int, **options: Any) -> ClosedForm:
    """Return the rule by which a generator makes its rows, to make the row of one rank alone.

    >>> from hp_schedule import closed_form, one_f_one_b
    >>> row = closed_form(one_f_one_b, 256, num_microbatches=1024).row(255)
    >>> [str(step) for step in row[:3]]
    ['255RECV_F0', '255F0', '255B0']

    A row is made in milliseconds whatever the number of ranks, except by `v_half`, by `u_shape` and
    by `zbv` for few microbatches or with a latency: their rows are found together, by the first
    call of `ClosedForm.row`.

    Args:
        generator: One of `hp_schedule.generators`.
        num_ranks: As for the generator.
        **options: As for the generator; `interleaved_1f1b` must not pair its steps.

    Raises:
        ValueError: If it is no generator of this package, or one of the options does not fit.
    """
    form = _FORMS.get(generator)
    if form is None:
        names = ", ".join(sorted(known.__name__ for known in _FORMS))
        raise ValueError(f"generator ({generator}) must be one of {names}")
    return form(num_ranks, **options)
