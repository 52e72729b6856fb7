"""The schedules by name: every class is one entry of the registry."""

import pytest
import torch
from torch import nn

from hp_schedule import SCHEDULES, add_send_recv
from hp_schedule import runtime as public
from hp_schedule.runtime import NamedSchedule, PipelineStage

CLASSES = {
    value.name: value
    for value in (getattr(public, name) for name in public.__all__)
    if isinstance(value, type) and issubclass(value, NamedSchedule) and value is not NamedSchedule
}


def _stages(num: int) -> list[PipelineStage]:
    cpu = torch.device("cpu")
    return [
        PipelineStage(nn.Linear(2, 2), stage_index=index, num_stages=num, device=cpu)
        for index in range(num)
    ]


def test_every_public_class_is_a_schedule_of_its_own() -> None:
    named = [name for name in public.__all__ if name.startswith("Schedule")]
    assert len(named) == len(CLASSES) + 1  # ScheduleOptions
    assert CLASSES.keys() < SCHEDULES.keys()


@pytest.mark.parametrize("name", [name for name, kind in SCHEDULES.items() if kind.trains])
def test_any_schedule_has_a_class_by_its_name_alone(name: str) -> None:
    made = type("Made", (CLASSES.get(name, NamedSchedule),), {"name": name})
    kind = SCHEDULES[name]
    per_rank = kind.stages_per_rank or 3
    runtime = made(_stages(per_rank + kind.returns), 4)
    assert runtime.schedule == add_send_recv(kind.build(1, 4, per_rank, paired=None))


def test_stages_that_ranks_cannot_share_equally_are_refused() -> None:
    class Made(NamedSchedule):
        name = "looped_bfs"

    made = Made.__new__(Made)
    made.num_ranks, made.num_stages, made.num_microbatches = 2, 3, 1
    with pytest.raises(ValueError, match=r"num_stages \(3\) must be a multiple of num_ranks \(2\)"):
        made.construct_exec_order()
