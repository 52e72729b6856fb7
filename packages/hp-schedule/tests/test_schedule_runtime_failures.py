"""Stages that fail and ranks that die: an error in the right words, and never a hang."""

import os
import threading
import time
import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hp_platform.testing import run_distributed
from hp_platform.testing.processes import RankError
from hp_schedule import Schedule, add_send_recv, interleaved_1f1b, one_f_one_b
from hp_schedule.runtime import (
    EdgeGroups,
    PipelineScheduleRuntime,
    PipelineStage,
    TensorSpec,
    TorchTransport,
    build_edge_groups,
)

SHAPE = (2, 4)


class Failing(nn.Module):
    """Fails or dies in the forward or backward of one microbatch; -1 for never."""

    def __init__(self, *, forward_at: int = -1, backward_at: int = -1, dies: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self._forward_at = forward_at
        self._backward_at = backward_at
        self._dies = dies
        self._calls = 0

    def forward(self, x: Tensor) -> Tensor:
        number, self._calls = self._calls, self._calls + 1
        if number == self._forward_at:
            self._fail()
        output: Tensor = self.layer(x)
        if number == self._backward_at:
            output.register_hook(lambda _: self._fail())
        return output

    def _fail(self) -> None:
        if self._dies:
            os._exit(7)
        raise ArithmeticError("the number is too large")


def run_pipeline(schedule: Schedule, modules: dict[int, nn.Module]) -> None:
    rank = dist.get_rank()
    stages = [
        PipelineStage(
            modules.get(stage, Failing()),
            stage_index=stage,
            num_stages=schedule.num_stages,
            device=torch.device("cpu"),
            input_spec=TensorSpec(SHAPE) if stage else None,
        )
        for stage in schedule.stages_of(rank)
    ]
    groups = build_edge_groups([range(schedule.num_ranks)])
    runtime = PipelineScheduleRuntime(
        stages,
        schedule,
        pipeline_rank=rank,
        transport=TorchTransport(schedule, rank_of=range(schedule.num_ranks), groups=groups),
        loss_fn=lambda output, target: (output * target).sum(),
    )
    num = schedule.num_microbatches
    runtime.run_microbatches([(torch.ones(SHAPE),)] * num, None, [torch.ones(SHAPE)] * num)


def report_failure(schedule: Schedule, failing: int, forward_at: int, backward_at: int) -> str:
    """Return the error as text; the process lives on, so that peers learn of it otherwise."""
    modules: dict[int, nn.Module] = {
        failing: Failing(forward_at=forward_at, backward_at=backward_at)
    }
    began = time.monotonic()
    try:
        run_pipeline(schedule, modules)
    except Exception as error:  # noqa: BLE001  # what kind of error is the point
        text = "".join(traceback.format_exception_only(error))
        return f"{time.monotonic() - began:.1f} s: {text}"
    return "no error"


@pytest.mark.parametrize(
    ("failing", "forward_at", "backward_at", "where"),
    [
        (1, 2, -1, "rank 1, stage 1, microbatch 2: in step 1F2"),
        (2, -1, 1, "rank 2, stage 2, microbatch 1: in step 2B1"),
        (0, 0, -1, "rank 0, stage 0, microbatch 0: in step 0F0"),
    ],
)
def test_a_failing_stage_names_its_place_and_the_other_ranks_fail_too(
    failing: int, forward_at: int, backward_at: int, where: str
) -> None:
    schedule = add_send_recv(one_f_one_b(3, num_microbatches=5))
    arguments = (schedule, failing, forward_at, backward_at)
    found = run_distributed(report_failure, *arguments, world_size=3, timeout=20)
    assert "ArithmeticError: the number is too large" in found[failing]
    assert where in found[failing]
    for rank, text in enumerate(found):
        assert f"rank {rank}" in text
        if rank != failing:
            assert "RuntimeError" in text


def test_a_failing_stage_of_an_interleaved_schedule_is_named() -> None:
    schedule = add_send_recv(interleaved_1f1b(2, num_microbatches=3))
    found = run_distributed(report_failure, schedule, 3, 1, -1, world_size=2, timeout=20)
    assert "rank 1, stage 3, microbatch 1: in step 3F1" in found[1]
    assert "RuntimeError" in found[0]


def die_in_the_middle(schedule: Schedule) -> None:
    run_pipeline(schedule, {1: Failing(forward_at=1, dies=True)})


def test_a_rank_that_dies_ends_the_run() -> None:
    schedule = add_send_recv(one_f_one_b(3, num_microbatches=4))
    with pytest.raises(RankError, match="rank 1 of 3 died: exited with status 7") as caught:
        run_distributed(die_in_the_middle, schedule, world_size=3, timeout=20)
    assert caught.value.rank == 1


def test_closed_edge_groups_say_so() -> None:
    groups = EdgeGroups({})
    groups.close()
    with pytest.raises(RuntimeError, match="closed after an error"):
        groups[0, 1]


def test_closing_nccl_groups_waits_for_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted, both = [], threading.Barrier(3)

    class Stuck:
        """Cannot be aborted before the other one is: its device runs the other one's kernel."""

        def abort(self) -> None:
            both.wait(timeout=10)
            aborted.append(self)

    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")
    stuck: Any = {(0, 1): Stuck(), (1, 0): Stuck()}
    EdgeGroups(stuck).close()
    assert not aborted
    both.wait(timeout=10)


@pytest.mark.parametrize(
    ("pipelines", "message"),
    [([], r"lengths of pipelines \(\[\]\)"), ([[0, 1], [2]], r"lengths of pipelines \(\[2, 1\]\)")],
)
def test_pipelines_must_be_of_one_length(pipelines: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_edge_groups(pipelines)


def test_a_single_rank_has_no_edges() -> None:
    assert (0, 1) not in build_edge_groups([[0], [1]])


def test_a_transport_needs_the_groups_of_its_edges() -> None:
    schedule = add_send_recv(one_f_one_b(2, num_microbatches=1))
    with pytest.raises(ValueError, match=r"len\(rank_of\) \(3\) must equal num_ranks \(2\)"):
        TorchTransport(schedule, rank_of=[0, 1, 2], groups=EdgeGroups({}))
