"""The schedules of torch.distributed.pipelining: read, proven, and refused where they are wrong.

Only their step lists are looked at; nothing is run, so that stages may be stubs.
"""

from collections.abc import Mapping, Sequence
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from hp_schedule import (
    FindingKind,
    Schedule,
    add_send_recv,
    drop_communication,
    from_csv,
    simulate,
    to_csv,
    validate,
)

_V_SHAPED = (schedules.ScheduleZBVZeroBubble, schedules.ScheduleDualPipeV)
_MULTI = (
    schedules.ScheduleLoopedBFS,
    schedules.ScheduleInterleaved1F1B,
    schedules.ScheduleInterleavedZeroBubble,
    *_V_SHAPED,
)
_POINTS = [(2, 4), (3, 6), (4, 4), (4, 8), (4, 12)]


def _stage(index: int, num_ranks: int, num_stages: int) -> Any:
    return SimpleNamespace(
        stage_index=index,
        num_stages=num_stages,
        group_size=num_ranks,
        group_rank=0,
        is_first=index == 0,
        is_last=index == num_stages - 1,
        has_backward=True,
        submod=None,
    )


def _build(kind: type, num_ranks: int, num_microbatches: int, **options: Any) -> Any:
    """Build one of torch's schedules of two stages per rank on stubs; skip what it refuses."""
    last = 2 * num_ranks - 1
    indices = (0, last if kind in _V_SHAPED else num_ranks)
    stages = [_stage(index, num_ranks, 2 * num_ranks) for index in indices]
    try:
        return kind(stages, num_microbatches, loss_fn=lambda output, _target: output, **options)
    except ValueError as error:
        pytest.skip(f"torch: {error}")


def _read(rows: Mapping[int, Sequence[object]]) -> Schedule:
    lines = (",".join("" if step is None else str(step) for step in rows[r]) for r in sorted(rows))
    return from_csv("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), _POINTS)
@pytest.mark.parametrize("kind", _MULTI)
def test_what_torch_makes_is_read_and_proven(
    kind: type, num_ranks: int, num_microbatches: int
) -> None:
    built = _build(kind, num_ranks, num_microbatches)
    orders = _read(built.pipeline_order)
    validate(orders, communication=False).raise_if_failed()
    assert from_csv(to_csv(orders)) == orders
    lowered = _read(built.pipeline_order_with_comms)
    validate(lowered, communication=True, max_active_stages=3).raise_if_failed()
    assert from_csv(to_csv(lowered)) == lowered


@pytest.mark.parametrize("kind", _MULTI)
def test_the_compute_order_of_torch_runs_sooner_with_messages_from_here(kind: type) -> None:
    lowered = _read(_build(kind, 4, 8).pipeline_order_with_comms)
    ours = add_send_recv(drop_communication(lowered))
    for channels in ("edge", "pair", "rank"):
        took = simulate(ours, channels=channels).makespan
        assert took <= simulate(lowered, channels=channels).makespan


@pytest.mark.parametrize("num_microbatches", [4, 6, 8])
def test_the_order_that_torch_draws_of_its_1f1b_is_refused(num_microbatches: int) -> None:
    """Its last rank skips the first microbatch and invents one at the end."""
    stage = _stage(0, 4, 4)
    built = schedules.Schedule1F1B(stage, num_microbatches, loss_fn=lambda output, _: output)
    report = validate(_read(built._get_pipeline_order() or {}))
    assert FindingKind.MISSING in {finding.kind for finding in report.findings}
    assert {finding.rank for finding in report.findings} >= {3}


@pytest.mark.skipif(
    "defer_pp_recv" not in signature(schedules.ScheduleInterleaved1F1B).parameters,
    reason="this torch does not defer receives",
)
@pytest.mark.parametrize(
    ("kind", "num_ranks", "num_microbatches"),
    [
        (schedules.ScheduleInterleaved1F1B, 2, 4),
        (schedules.ScheduleInterleaved1F1B, 4, 8),
        (schedules.ScheduleInterleavedZeroBubble, 2, 4),
        (schedules.ScheduleZBVZeroBubble, 2, 4),
        (schedules.ScheduleZBVZeroBubble, 4, 8),
        (schedules.ScheduleDualPipeV, 4, 8),
    ],
)
def test_the_deferred_receives_of_torch_are_refused(
    kind: type, num_ranks: int, num_microbatches: int
) -> None:
    built = _build(kind, num_ranks, num_microbatches, defer_pp_recv=True)
    report = validate(_read(built.pipeline_order_with_comms), communication=True)
    assert {finding.kind for finding in report.findings} <= {
        FindingKind.MESSAGE_ORDER,
        FindingKind.DEADLOCK,
    }
    assert not report
