"""The machines that the simulator knows: channels, bandwidth, cores, sharded parameters."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hp_schedule import (
    ChannelModel,
    Costs,
    DeadlockError,
    MetaStep,
    Schedule,
    add_fsdp_reduce_grad,
    add_fsdp_unshard_reshard,
    add_send_recv,
    dualpipe_v,
    forward_only,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    one_f_one_b,
    simulate,
    u_shape,
    validate,
    zbv,
)
from hp_schedule.simulation.recurrence import recurrence
from hp_schedule.simulation.simulate import Machine

_CHANNELS: tuple[ChannelModel, ...] = ("edge", "pair", "rank")


def _schedule(*rows: str, num_microbatches: int, stage_to_rank: list[int]) -> Schedule:
    return Schedule.from_steps(
        [[MetaStep.from_str(text) for text in row.split()] for row in rows],
        stage_to_rank=stage_to_rank,
        num_microbatches=num_microbatches,
    )


def _two_ways(*rows: str) -> Schedule:
    """One chain from rank 0 to rank 1, one back."""
    return Schedule.from_steps(
        [[MetaStep.from_str(text) for text in row.split()] for row in rows],
        stage_to_rank=[0, 1, 1, 0],
        num_microbatches=1,
        chains=[[0, 1], [2, 3]],
    )


def _random_costs(schedule: Schedule, rng: random.Random, *, message: float | None = None) -> Costs:
    def table() -> list[list[float]]:
        return [
            [rng.uniform(0.2, 2) for _ in range(schedule.num_microbatches)]
            for _ in range(schedule.num_stages)
        ]

    latency = {edge: rng.choice([0.0, rng.uniform(0, 0.5)]) for edge in schedule.edges}
    costs = Costs(table(), table(), table(), activation=table(), latency=latency)
    return costs if message is None else replace(costs, message=table(), bandwidth=1 / message)


def _agree(schedule: Schedule, costs: Costs) -> None:
    """The recurrence gives the numbers of the event machine, and the simulator those of both."""
    found = recurrence(schedule, costs)
    machine = Machine(schedule, costs)
    makespan = machine.run()
    assert found is not None
    assert found.makespan == pytest.approx(makespan)
    assert found.busy == pytest.approx([rank.busy for rank in machine.ranks])
    assert found.exposed == pytest.approx([rank.exposed for rank in machine.ranks])
    assert found.peak == pytest.approx([rank.peak for rank in machine.ranks])
    simulated = simulate(schedule, costs)
    assert simulated.makespan == found.makespan
    assert simulated.timeline.makespan == pytest.approx(makespan)


@pytest.mark.parametrize(
    "schedule",
    [
        one_f_one_b(4, num_microbatches=7),
        interleaved_1f1b(3, num_microbatches=5, num_stages_per_rank=3),
        interleaved_zero_bubble(4, num_microbatches=6, num_stages_per_rank=2),
        zbv(4, num_microbatches=7),
        dualpipe_v(3, num_microbatches=8),
        u_shape(3, num_microbatches=4),
        interleaved_1f1b(3, num_microbatches=5, overlap_b_f=True),
        forward_only(3, num_microbatches=4),
    ],
)
def test_without_contention_a_recurrence_gives_the_numbers_of_the_event_machine(
    schedule: Schedule,
) -> None:
    rng = random.Random(0)
    for _ in range(10):
        _agree(schedule, _random_costs(schedule, rng))


@pytest.mark.parametrize("message", [0.1, 1.0, 5.0])
@pytest.mark.parametrize(
    "schedule",
    [
        one_f_one_b(4, num_microbatches=7),
        interleaved_zero_bubble(4, num_microbatches=6, num_stages_per_rank=2),
        zbv(2, num_microbatches=5),
        forward_only(3, num_microbatches=4),
    ],
)
def test_the_recurrence_lets_messages_queue_on_their_edge_as_the_event_machine_does(
    schedule: Schedule, message: float
) -> None:
    rng = random.Random(2)
    for _ in range(10):
        _agree(schedule, _random_costs(schedule, rng, message=message))


@pytest.mark.parametrize(
    "schedule",
    [
        interleaved_1f1b(4, num_microbatches=6),
        zbv(3, num_microbatches=6),
        gpipe(4, num_microbatches=4),
    ],
)
def test_messages_laid_out_for_the_costs_are_free_with_a_channel_for_each_edge(
    schedule: Schedule,
) -> None:
    rng = random.Random(1)
    for _ in range(5):
        costs = _random_costs(schedule, rng)
        with_messages = add_send_recv(schedule, costs=costs)
        best = simulate(schedule, costs)
        found = simulate(with_messages, costs)
        assert found.makespan == pytest.approx(best.makespan)
        assert found.exposed_communication == pytest.approx(best.exposed_communication)
        # Whatever shares more can only take longer.
        times = [simulate(with_messages, costs, channels=c).makespan for c in _CHANNELS]
        assert times[0] <= times[1] * (1 + 1e-9)
        assert times[1] <= times[2] * (1 + 1e-9)
        assert simulate(with_messages, costs, blocking=True).makespan >= times[0] * (1 - 1e-9)


def test_a_message_occupies_its_channel_for_its_size_and_then_travels() -> None:
    schedule = forward_only(2, num_microbatches=3)
    costs = Costs(latency=0.5, message=4, bandwidth=2)
    spans = [s for s in simulate(schedule, costs).timeline if s.rank == 1 and str(s.step)[1] == "F"]
    # Produced at 1, 2 and 3; the wire takes 2 each, one after the other.
    assert [span.start for span in spans] == [3.5, 5.5, 7.5]
    assert simulate(schedule, costs).exposed_communication == (0, 2.5 + 1 + 1)


def test_messages_may_differ_in_size_from_stage_to_stage_and_gradients_are_as_large() -> None:
    costs = Costs(message=[2, 100], bandwidth=1)
    assert simulate(gpipe(2, num_microbatches=1), costs).makespan == 1 + 2 + 1 + 2 + 2 + 2


@pytest.mark.parametrize(("channels", "makespan"), [("edge", 2.5), ("pair", 3.0), ("rank", 3.0)])
def test_who_shares_a_queue_waits_for_each_other(channels: ChannelModel, makespan: float) -> None:
    schedule = _two_ways("0F0 0SEND_F0 3RECV_F0 3F0", "2F0 1RECV_F0 2SEND_F0 1F0")
    assert simulate(schedule, Costs(latency=0.5), channels=channels).makespan == makespan


def test_head_on_messages_deadlock_where_both_directions_share_a_queue() -> None:
    schedule = _two_ways("0F0 0SEND_F0 3RECV_F0 3F0", "2F0 2SEND_F0 1RECV_F0 1F0")
    assert simulate(schedule, channels="edge").makespan == 2
    for channels in ("pair", "rank"):
        with pytest.raises(DeadlockError, match=r"rank 0 at cell 3 \(3F0\)"):
            simulate(schedule, channels=channels)
    with pytest.raises(DeadlockError, match="rank 0"):
        simulate(schedule, blocking=True)


def test_a_blocking_message_holds_up_both_its_ranks() -> None:
    schedule = _schedule(
        "0F0 0SEND_F0 0F1 0SEND_F1",
        "1RECV_F0 1F0 1RECV_F1 1F1",
        stage_to_rank=[0, 1],
        num_microbatches=2,
    )
    costs = Costs(forward=[1, 2], latency=0.5)
    # Rank 1 comes to its second receive at 3.5.
    assert simulate(schedule, costs).exposed_communication == (0, 0.5 + 0.5)
    found = simulate(schedule, costs, blocking=True)
    assert found.makespan == 1 + 0.5 + 2 + 0.5 + 2
    assert found.exposed_communication == (0.5 + 1.5, 0.5 + 0.5)
    texts = [(str(s.step), s.start, s.end) for s in found.timeline if s.rank == 0]
    assert texts == [("0F0", 0, 1), ("0SEND_F0", 1, 1.5), ("0F1", 1.5, 2.5), ("0SEND_F1", 2.5, 4)]


def test_what_is_sent_without_a_step_holds_up_its_sender_alone() -> None:
    schedule = _schedule("0F0 0F1", "1F0 1F1", stage_to_rank=[0, 1], num_microbatches=2)
    costs = Costs(forward=[1, 2], latency=0.5)
    found = simulate(schedule, costs, blocking=True)
    assert found.makespan == 1 + 0.5 + 2 + 2
    assert found.exposed_communication == (1.0, 0.5)
    assert found.bubble[0] == pytest.approx(1 - 2 / found.makespan)
    texts = [(str(s.step), s.start, s.end) for s in found.timeline if s.rank == 0]
    assert texts == [("0F0", 0, 1), ("0SEND_F0", 1, 1.5), ("0F1", 1.5, 2.5), ("0SEND_F1", 2.5, 3)]


@pytest.mark.parametrize("seed", range(12))
def test_blocking_sends_take_as_long_on_the_clock_as_without_one(seed: int) -> None:
    rng = random.Random(seed)
    schedule = rng.choice(
        [
            interleaved_zero_bubble(3, num_microbatches=5),
            zbv(3, num_microbatches=4),
            u_shape(3, num_microbatches=4),
            _two_ways("0F0 3F0", "2F0 1F0"),
        ]
    )
    messages = [[rng.random() for _ in range(schedule.num_microbatches)]] * schedule.num_stages
    costs = replace(_random_costs(schedule, rng), message=messages, bandwidth=2.0)
    machine = Machine(schedule, costs, blocking=True)
    found = simulate(schedule, costs, blocking=True)
    assert found.makespan == pytest.approx(machine.run(), rel=1e-12)
    assert found.exposed_communication == pytest.approx([rank.exposed for rank in machine.ranks])
    busy = [(1 - share) * found.makespan for share in found.bubble]
    assert busy == pytest.approx([rank.busy for rank in machine.ranks])
    assert found.makespan >= simulate(schedule, costs).makespan * (1 - 1e-12)


def test_messages_of_a_blocking_overlap_move_at_once() -> None:
    pairs = dualpipe_v(2, num_microbatches=6)
    costs = Costs(latency=0.25)
    machine = Machine(pairs, costs, blocking=True)
    assert simulate(pairs, costs, blocking=True).makespan == machine.run()
    # What one rank sends in a pair goes to its only neighbour, two messages in one latency.
    steps = sum(len(step.sub_steps) == 2 for step in pairs.steps[0] if step)
    sent = machine.ranks[0].exposed
    assert steps > 0
    assert sent >= 0.25


def test_ranks_that_share_cores_slow_each_other_down() -> None:
    # Two independent ranks: each alone takes 3 and 2.
    schedule = Schedule.from_steps(
        [[MetaStep.from_str("0F0")], [MetaStep.from_str("1F0")]],
        stage_to_rank=[0, 1],
        num_microbatches=1,
        chains=[[0], [1]],
    )
    costs = Costs(forward=[3, 2])
    assert simulate(schedule, costs, cores=2).makespan == 3
    found = simulate(schedule, costs, cores=1)
    # Half speed until rank 1 is done at 4, then 1 is left of rank 0.
    assert [span.end for span in found.timeline] == [5, 4]
    assert found.bubble == pytest.approx((0, 1 / 5))


def test_one_core_takes_the_work_of_all_ranks_and_enough_cores_take_nothing_away() -> None:
    schedule = interleaved_1f1b(4, num_microbatches=6)
    work = 3 * schedule.num_stages * 6
    assert simulate(schedule, cores=1).makespan == pytest.approx(work)
    times = [simulate(schedule, cores=cores).makespan for cores in (1, 2, 3, 4)]
    assert times == sorted(times, reverse=True)
    assert times[-1] == pytest.approx(simulate(schedule).makespan)


def test_there_must_be_a_core() -> None:
    with pytest.raises(ValueError, match=r"cores \(0\) must be >= 1"):
        simulate(gpipe(2, num_microbatches=1), cores=0)


def test_unknown_channels_are_refused_by_name() -> None:
    schedule = add_send_recv(gpipe(2, num_microbatches=1))
    for use in (simulate, validate):
        with pytest.raises(ValueError, match=r"channels \(link\) must be edge or pair or rank"):
            use(schedule, channels="link")  # type: ignore[arg-type]


def test_compute_steps_wait_for_parameters_and_the_end_for_gradients() -> None:
    row = "0UNSHARD 1UNSHARD 0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD"
    schedule = _schedule(row, stage_to_rank=[0, 0], num_microbatches=1)
    found = simulate(schedule, Costs(unshard=2, reduce_grad=[4, 1]))
    spans = [(str(span.step), span.start, span.end) for span in found.timeline]
    assert spans == [
        ("0UNSHARD", 0, 2),
        ("0F0", 2, 3),
        ("1UNSHARD", 3, 4),
        ("1F0", 4, 5),
        ("1B0", 5, 7),
        ("0B0", 7, 9),
        ("0REDUCE_GRAD", 9, 13),
    ]
    assert found.makespan == 13
    assert found.exposed_communication == (2 + 1 + 4,)


def test_prefetch_hides_the_gathering_of_parameters() -> None:
    schedule = interleaved_1f1b(2, num_microbatches=8, num_stages_per_rank=4)
    costs = Costs(unshard=0.5, reduce_grad=0.5)
    times = [
        simulate(
            add_fsdp_reduce_grad(add_fsdp_unshard_reshard(schedule, prefetch=prefetch)), costs
        ).makespan
        for prefetch in (0, 1, 2)
    ]
    assert times[0] > times[1] >= times[2] >= simulate(schedule).makespan


def test_parameters_that_cost_nothing_change_nothing() -> None:
    schedule = interleaved_1f1b(3, num_microbatches=4)
    sharded = add_fsdp_reduce_grad(add_fsdp_unshard_reshard(schedule))
    assert simulate(sharded) == simulate(schedule)


def _sweep(num_ranks: int) -> Iterator[tuple[int, Schedule]]:
    """Yield what the published comparison of send and receive orders was made on."""
    for num in (num_ranks // 2, num_ranks, 3 * num_ranks // 2 + 1, 2 * num_ranks, 4 * num_ranks):
        yield 1, one_f_one_b(num_ranks, num_microbatches=num)
        yield 2, zbv(num_ranks, num_microbatches=num)
        for per_rank in (2, 4):
            for make in (interleaved_1f1b, interleaved_zero_bubble):
                yield (
                    per_rank,
                    make(num_ranks, num_microbatches=num, num_stages_per_rank=per_rank),
                )


@pytest.mark.parametrize(("num_ranks", "told"), [(4, True), (4, False), (8, False)])
def test_messages_cost_next_to_nothing_whoever_shares_a_communicator(
    num_ranks: int, told: bool
) -> None:
    """Published: 4.1 % of column scans with one communicator for all ranks, 68 % of torch."""
    extra: dict[ChannelModel, list[float]] = {channels: [] for channels in _CHANNELS}
    for per_rank, schedule in _sweep(num_ranks):
        share = 1 / per_rank
        costs = Costs(share, share, share, latency=0.05)
        ours = add_send_recv(schedule, costs=costs if told else None)
        best = simulate(schedule, costs).makespan
        for channels, found in extra.items():
            found.append(simulate(ours, costs, channels=channels).makespan / best - 1)
    mean = {channels: sum(found) / len(found) for channels, found in extra.items()}
    assert mean["edge"] <= 0.001
    assert mean["pair"] <= 0.005
    assert mean["rank"] <= 0.01
