"""Stages that fail and ranks that die: an error in the right words, and never a hang."""

import os
import re
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
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


SHORT = add_send_recv(one_f_one_b(3, num_microbatches=3))


def run_pipeline(
    schedule: Schedule,
    modules: dict[int, nn.Module],
    *,
    specs: dict[int, TensorSpec] | None = None,
    timeout: timedelta | None = None,
    num_args: int | None = None,
) -> None:
    rank = dist.get_rank()
    specs = {} if specs is None else specs
    stages = [
        PipelineStage(
            modules.get(stage, Failing()),
            stage_index=stage,
            num_stages=schedule.num_stages,
            device=torch.device("cpu"),
            input_spec=specs.get(stage, TensorSpec(SHAPE)) if stage else None,
        )
        for stage in schedule.stages_of(rank)
    ]
    groups = build_edge_groups([range(schedule.num_ranks)], timeout=timeout)
    runtime = PipelineScheduleRuntime(
        stages,
        schedule,
        pipeline_rank=rank,
        transport=TorchTransport(schedule, rank_of=range(schedule.num_ranks), groups=groups),
        loss_fn=lambda output, target: (output * target).sum(),
    )
    num = schedule.num_microbatches
    given = num if num_args is None else num_args
    runtime.run_microbatches([(torch.ones(SHAPE),)] * given, None, [torch.ones(SHAPE)] * num)


def report_failure(schedule: Schedule, failing: int, forward_at: int, backward_at: int) -> str:
    """Return the error as text; the process lives on, so that peers learn of it otherwise."""
    modules: dict[int, nn.Module] = {
        failing: Failing(forward_at=forward_at, backward_at=backward_at)
    }
    return report(lambda: run_pipeline(schedule, modules))


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
            assert f"PeerError: {where}" in text
            assert "ArithmeticError: the number is too large" in text
            assert re.search("while (waiting for|sending) the|after the last step", text)


def test_a_failing_stage_of_an_interleaved_schedule_is_named() -> None:
    schedule = add_send_recv(interleaved_1f1b(2, num_microbatches=3))
    found = run_distributed(report_failure, schedule, 3, 1, -1, world_size=2, timeout=20)
    assert "rank 1, stage 3, microbatch 1: in step 3F1" in found[1]
    assert "PeerError: rank 1, stage 3, microbatch 1: in step 3F1" in found[0]


def report_shapes(expected: tuple[int, ...]) -> str:
    """Run three stages, the last of which expects another shape than it will get."""
    return report(lambda: run_pipeline(SHORT, {}, specs={2: TensorSpec(expected)}))


def report(run: Callable[[], None]) -> str:
    """Return the error as text, and how long it took."""
    began = time.monotonic()
    try:
        run()
    except Exception as error:  # noqa: BLE001  # what kind of error is the point
        text = "".join(traceback.format_exception_only(error))
        return f"{time.monotonic() - began:.1f} s: {text}"
    return "no error"


def test_an_output_that_the_next_stage_does_not_expect_is_never_sent() -> None:
    found = run_distributed(report_shapes, (2, 5), world_size=3, timeout=20)
    where = "rank 1, stage 1, microbatch 0: in step 1SEND_F0"
    assert "output ([2, 4] float32) of stage 1, microbatch 0 must be as" in found[1]
    assert "input_spec ([2, 5] float32) of stage 2" in found[1]
    assert where in found[1]
    assert all(f"PeerError: {where}" in found[rank] for rank in (0, 2))


class Slow(Failing):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(1.5)
        return super().forward(x)


def report_late_stage() -> str:
    modules: dict[int, nn.Module] = {1: Slow()}
    return report(lambda: run_pipeline(SHORT, modules, timeout=timedelta(seconds=0.5)))


def test_a_stage_that_takes_longer_than_the_time_out_fails_its_neighbours_by_name() -> None:
    # 1.5 s on a quiet machine; what must not happen is that somebody waits for ever.
    found = run_distributed(report_late_stage, world_size=3, timeout=200)
    assert "while waiting for the input of stage 2, microbatch 0, rank 1 -> rank 2" in found[2]
    assert "rank 2, stage 2, microbatch 0: in step 2F0" in found[2]
    assert all("no error" not in text and float(text.split()[0]) < 100 for text in found)


def report_wrong_batch() -> str:
    """Rank 0 is given one microbatch too few."""

    def run() -> None:
        run_pipeline(SHORT, {}, num_args=SHORT.num_microbatches - (dist.get_rank() == 0))

    return report(run)


def test_arguments_that_are_wrong_on_one_rank_fail_all() -> None:
    found = run_distributed(report_wrong_batch, world_size=3, timeout=20)
    assert "len(args) (2) must equal num_microbatches (3)" in found[0]
    assert "rank 0: before the first step" in found[0]
    assert all("PeerError: rank 0, before the first step: " in text for text in found[1:])


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

        def size(self) -> int:
            return 2

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
