"""The order of a schedule's steps, priced again and again."""

from random import Random

import pytest

from hp_schedule import (
    SCHEDULES,
    Costs,
    DeadlockError,
    Path,
    Precedence,
    Schedule,
    add_fsdp_reduce_grad,
    add_fsdp_unshard_reshard,
    add_send_recv,
    interleaved_1f1b,
    length,
    one_f_one_b,
    simulate,
)


def random_costs(schedule: Schedule, random: Random, *, is_sharded: bool) -> Costs:
    def each() -> list[float]:
        return [random.random() for _ in range(schedule.num_stages)]

    return Costs(
        forward=each(),
        input_grad=each(),
        weight_grad=each(),
        activation=each(),
        latency={edge: random.random() for edge in schedule.edges},
        unshard=each() if is_sharded else 0.0,
        reduce_grad=each() if is_sharded else 0.0,
    )


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("name", [kind.name for kind in SCHEDULES.values() if kind.trains])
def test_the_longest_path_is_as_long_as_the_simulator_takes(name: str, is_sharded: bool) -> None:
    random, kind = Random(1), SCHEDULES[name]
    for pp in (1, 2, 4):
        for per_rank in (kind.stages_per_rank,) if kind.stages_per_rank else (1, 3):
            for number in (1, 3, 8):
                schedule = kind.build(pp, number, per_rank)
                if is_sharded:
                    schedule = add_fsdp_unshard_reshard(add_fsdp_reduce_grad(schedule))
                order = Precedence(schedule)
                paths: list[Path] = []
                for _ in range(3):
                    costs = random_costs(schedule, random, is_sharded=is_sharded)
                    flat, simulated = order.flat(costs), simulate(schedule, costs)
                    seconds, path = order.longest(flat)
                    assert seconds == pytest.approx(simulated.makespan, rel=1e-12)
                    assert length(path, flat) == pytest.approx(seconds, rel=1e-12)
                    # Paths that were longest before are bounds.
                    assert all(length(one, flat) <= seconds * (1 + 1e-12) for one in paths)
                    paths.append(path)
                    assert isinstance(costs.activation, list)
                    held = [
                        max(
                            sum(map(float.__mul__, costs.activation, map(float, one))) for one in of
                        )
                        for of in order.peaks
                    ]
                    assert held == pytest.approx(simulated.peak_activations, rel=1e-12)


def test_what_is_not_in_the_order_of_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="must have neither communication steps nor overlaps"):
        Precedence(add_send_recv(one_f_one_b(2, num_microbatches=2)))
    with pytest.raises(ValueError, match="must have neither communication steps nor overlaps"):
        Precedence(interleaved_1f1b(2, num_microbatches=4, num_stages_per_rank=2, overlap_b_f=True))


def test_rows_that_wait_for_each_other_end_in_an_error() -> None:
    schedule = one_f_one_b(2, num_microbatches=1)
    turned = schedule.with_rows(row.codes()[::-1] for row in schedule.steps)
    with pytest.raises(DeadlockError, match="no rank can go on"):
        Precedence(turned)
