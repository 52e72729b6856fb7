"""Time, bubble and memory of schedules, against known numbers."""

import pytest

from hp_schedule import (
    Costs,
    DeadlockError,
    MetaStep,
    MetaStepType,
    Schedule,
    add_send_recv,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    simulate,
)
from hp_schedule.costs import PerStep


def _share_costs(num_stages_per_rank: int, latency: float) -> Costs:
    """Forward, input and weight gradient of a rank's share of the model take 1 each."""
    share = 1 / num_stages_per_rank
    return Costs(
        forward=share, input_grad=share, weight_grad=share, latency=latency, activation=share
    )


@pytest.mark.parametrize(
    ("num_microbatches", "num_stages_per_rank", "latency", "makespan", "peak"),
    [
        (16, 1, 0.0, 69.00, 8),
        (16, 1, 0.05, 71.00, 8),
        (16, 1, 0.2, 77.00, 8),
        (16, 2, 0.0, 58.50, 11.5),
        (16, 2, 0.05, 60.00, 11.5),
        (16, 4, 0.0, 53.25, 9.75),
        (16, 4, 0.2, 65.65, 9.75),
        (13, 2, 0.05, 50.20, 13),
        (4, 2, 0.0, 28.50, 4),
        (4, 4, 0.05, 29.35, 4),
    ],
)
def test_eight_ranks_take_the_published_time_and_memory(
    num_microbatches: int, num_stages_per_rank: int, latency: float, makespan: float, peak: float
) -> None:
    schedule = interleaved_1f1b(
        8, num_microbatches=num_microbatches, num_stages_per_rank=num_stages_per_rank
    )
    result = simulate(schedule, _share_costs(num_stages_per_rank, latency))
    assert result.makespan == pytest.approx(makespan)
    assert max(result.peak_activations) == pytest.approx(peak)


def test_bubble_is_the_idle_share_of_the_makespan() -> None:
    result = simulate(one_f_one_b(4, num_microbatches=5))
    assert result.makespan == 24
    assert result.bubble == pytest.approx((9 / 24,) * 4)


def test_costs_may_differ_from_stage_to_stage() -> None:
    costs = Costs(forward=[1, 5], input_grad=[1, 2], weight_grad=0)
    result = simulate(gpipe(2, num_microbatches=2), costs)
    assert result.makespan == 1 + 5 + 5 + 2 + 2 + 1


def test_costs_may_differ_from_microbatch_to_microbatch() -> None:
    costs = Costs(forward=[[1, 2], 3], input_grad=[[1, 4], [2, 5]], weight_grad=0)
    result = simulate(gpipe(2, num_microbatches=2), costs)
    assert result.makespan == 1 + 3 + 3 + 2 + 5 + 4


def test_latency_may_differ_from_edge_to_edge() -> None:
    there, back = 0.25, 4
    result = simulate(gpipe(2, num_microbatches=1), Costs(latency={(0, 1): there, (1, 0): back}))
    assert result.makespan == 1 + there + 1 + 2 + back + 2
    with pytest.raises(ValueError, match=r"latency must have the edge \(1, 0\)"):
        simulate(gpipe(2, num_microbatches=1), Costs(latency={(0, 1): there}))


def test_a_wait_for_a_message_is_a_span_of_its_receive() -> None:
    result = simulate(add_send_recv(gpipe(2, num_microbatches=1)), Costs(latency=0.5))
    spans = [(span.rank, str(span.step), span.start, span.end) for span in result.timeline]
    assert spans == [
        (0, "0F0", 0, 1),
        (0, "0RECV_B0", 1, 5),
        (0, "0B0", 5, 7),
        (1, "1RECV_F0", 0, 1.5),
        (1, "1F0", 1.5, 2.5),
        (1, "1B0", 2.5, 4.5),
    ]


def test_an_overlap_takes_both_times_and_hands_out_both_results_at_its_end() -> None:
    rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "(1B0;1F1)OVERLAP_B_F", "1B1"]]
    schedule = Schedule.from_steps(
        [[MetaStep.from_str(text) for text in row] for row in rows],
        stage_to_rank=[0, 1],
        num_microbatches=2,
    )
    timeline = simulate(schedule).timeline
    ends = {str(span.step): span.end for span in timeline}
    starts = {str(span.step): span.start for span in timeline}
    assert ends["(1B0;1F1)OVERLAP_B_F"] == 5
    assert starts["0B0"] == 5
    assert starts["1B1"] == 5


def test_a_split_backward_frees_others_before_its_own_memory() -> None:
    rows = [["0F0", "0B0"], ["1F0", "1I0", "1W0"]]
    schedule = Schedule.from_steps(
        [[MetaStep.from_str(text) for text in row] for row in rows],
        stage_to_rank=[0, 1],
        num_microbatches=1,
    )
    timeline = simulate(schedule).timeline
    backward = next(span for span in timeline if span.step == MetaStep(MetaStepType.BWD, 0, 0))
    assert (backward.start, backward.end) == (3, 5)


def test_a_schedule_that_cannot_run_is_a_deadlock_error_with_its_places() -> None:
    schedule = Schedule.from_steps(
        [[MetaStep.from_str("1F0"), MetaStep.from_str("0F0")]],
        stage_to_rank=[0, 0],
        num_microbatches=1,
    )
    with pytest.raises(DeadlockError, match=r"rank 0 at cell 0 \(1F0\)"):
        simulate(schedule)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (Costs(forward=[1.0]), r"len\(forward\) \(1\) must equal num_stages \(2\)"),
        (Costs(activation=[1.0] * 3), r"len\(activation\) \(3\) must equal num_stages \(2\)"),
        (
            Costs(input_grad=[[1.0], [1.0, 2.0]]),
            r"len\(input_grad\[1\]\) \(2\) must equal num_microbatches \(1\)",
        ),
    ],
)
def test_costs_must_fit_the_stages(costs: Costs, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(gpipe(2, num_microbatches=1), costs)


@pytest.mark.parametrize("value", [-1.0, float("nan"), [1.0, -2.0], [[1.0], [-2.0]]])
def test_costs_must_not_be_negative(value: PerStep) -> None:
    with pytest.raises(ValueError, match="must be >= 0"):
        Costs(forward=value)


def test_a_latency_must_not_be_negative_on_any_edge() -> None:
    with pytest.raises(ValueError, match=r"latency \(-1\) must be >= 0"):
        Costs(latency={(0, 1): 1, (1, 0): -1})


def test_a_bandwidth_must_let_something_through() -> None:
    with pytest.raises(ValueError, match=r"bandwidth \(0\) must be > 0"):
        Costs(bandwidth=0)


def test_messages_need_time_to_be_ordered_by() -> None:
    with pytest.raises(ValueError, match="must be > 0"):
        add_send_recv(gpipe(2, num_microbatches=1), costs=Costs(forward=0))
