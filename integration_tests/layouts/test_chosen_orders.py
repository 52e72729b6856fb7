"""A searched order of microbatches trains: sums commute, and have the bits of that order."""

from pathlib import Path
from typing import Any

import pytest

from hp_platform.testing import compare
from hp_schedule import Costs, MetaStep, MetaStepType, Schedule, search
from hp_trainer.layout.schedules import training_schedule
from integration_tests.runs import Result, config_of, train_in

NUM = 8
LAYOUT: dict[str, dict[str, Any]] = {
    "mesh": {"pp": 2},
    "pipeline": {"schedule": "zero_bubble"},
}
TRAIN: dict[str, Any] = {"microbatch_size": 1, "dtype": "float64"}
SHARDED: dict[str, dict[str, Any]] = {**LAYOUT, "mesh": {"pp": 2, "dp_shard": 2}}
LONG = [1.0, 1.0, 1.0, 5.0, 1.0, 2.0, 1.0, 4.0]
"""What the microbatches are said to take; what they are does not matter here."""


def searched(num_microbatches: int) -> Schedule:
    """Return a schedule of two stages that takes the long microbatches when it suits it."""
    lengths = [LONG[:num_microbatches]] * 2
    result = search(
        Costs(lengths, lengths, lengths),
        num_ranks=2,
        num_microbatches=num_microbatches,
        virtual=(1,),
        memory_limit=2,
        num_candidates=60,
    )
    return result.schedule


def order_of(schedule: Schedule, kind: MetaStepType) -> list[list[int]]:
    """Return the microbatches of each stage in the order of one kind of step."""
    return [
        [
            step.microbatch_index
            for step in schedule.steps[rank]
            if step is not None and step.type is kind and step.microbatch_index is not None
        ]
        for rank in schedule.stage_to_rank
    ]


def in_one_process(order: list[int]) -> Schedule:
    """Return a schedule of one stage that takes the microbatches in an order."""
    row = [
        MetaStep(kind, 0, microbatch)
        for microbatch in order
        for kind in (MetaStepType.FWD, MetaStepType.BWD)
    ]
    return Schedule.from_steps([row], stage_to_rank=[0], num_microbatches=len(order))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Two steps in the order of the data."""
    return train_in(config_of(train={**TRAIN, "steps": 2}), tmp_path_factory.mktemp("one"))


@pytest.mark.sample("pp2-fsdp2")
@pytest.mark.parametrize("layout", [LAYOUT, SHARDED], ids=["pp2", "pp2-fsdp2"])
def test_a_searched_order_computes_what_one_process_does(
    layout: dict[str, dict[str, Any]], one_process: Result, tmp_path: Path
) -> None:
    schedule = searched(NUM // (2 if layout is SHARDED else 1))
    config = config_of(layout, train={**TRAIN, "steps": 2})
    chosen = train_in(config, tmp_path / "chosen", compute=schedule)
    comparison = compare(chosen.first_gradients, one_process.first_gradients, bound=1e-12)
    assert comparison.ok, comparison
    assert chosen.losses == pytest.approx(one_process.losses, rel=1e-12)
    assert chosen.norms == pytest.approx(one_process.norms, rel=1e-12)


def test_gradients_are_bit_for_bit_those_of_one_process_in_the_chosen_order(
    one_process: Result, tmp_path: Path
) -> None:
    schedule = searched(NUM)
    orders = order_of(schedule, MetaStepType.BWD_WEIGHT)
    # The data of a microbatch is that of its number, whenever it comes.
    assert orders[0] == orders[1] != list(range(NUM))
    train = {**TRAIN, "steps": 1}
    chosen = train_in(config_of(LAYOUT, train=train), tmp_path / "chosen", compute=schedule)
    same = in_one_process(orders[0])
    alone = train_in(config_of(train=train), tmp_path / "alone", compute=same)
    comparison = compare(chosen.first_gradients, alone.first_gradients)
    assert comparison.ok, comparison
    assert not compare(chosen.first_gradients, one_process.first_gradients).ok


@pytest.mark.parametrize(
    ("schedule", "num", "message"),
    [
        ("1f1b", NUM, r"pipeline.schedule \(1f1b\) must compute weight gradients apart"),
        ("zero_bubble", 4, r"num_microbatches \(8\) must equal those of a step \(4\)"),
        ("zbv", NUM, r"stage_to_rank \(\(0, 1\)\) must be that of pipeline.schedule \(zbv\)"),
    ],
)
def test_steps_that_the_stages_cannot_take_are_refused(
    schedule: str, num: int, message: str
) -> None:
    layout = {"pipeline": {"schedule": schedule, "stages_per_rank": 1 + (schedule == "zbv")}}
    config = config_of(LAYOUT, **layout)
    with pytest.raises(ValueError, match=message):
        training_schedule(config.pipeline, num_ranks=2, num_microbatches=num, compute=searched(NUM))
