"""Schedules in code written for torch.distributed.pipelining, and in torch's own runtime."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.tensor import DTensor

from hp_platform.testing import run_distributed
from hp_schedule import (
    MetaStep,
    MetaStepType,
    ModelCosts,
    Schedule,
    add_fsdp_reduce_grad,
    add_send_recv,
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    one_f_one_b,
    search,
    to_csv,
)
from hp_schedule.runtime import TensorSpec, as_torch_schedule

WIDTH, ROWS = 6, 8
OLD_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)


class Block(nn.Module):
    """A layer that knows nothing of pipelines; takes a keyword argument."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            self.linear.weight.normal_(generator=generator)
            self.linear.bias.normal_(generator=generator)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        y: Tensor = x + torch.tanh(self.linear(x))
        return y if shift is None else y + shift


@dataclass(frozen=True)
class Outcome:
    """What one rank, or one process, has after its steps."""

    losses: list[Tensor]
    outputs: list[Tensor]
    grads: dict[str, Tensor]


def loss_fn(output: Tensor, target: Tensor, scale: float = 1.0) -> Tensor:
    return (output - target).square().mean() * scale


def batch(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(3, rows, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return x[0], x[1], x[2]


def one_process(schedule: Schedule, rows: int = ROWS, steps: int = 1) -> Outcome:
    blocks = [Block(stage) for stage in range(schedule.num_stages)]
    num = schedule.num_microbatches
    losses, outputs = [], []
    for _ in range(steps):
        for x, target, shift in zip(*(t.tensor_split(num) for t in batch(rows)), strict=True):
            output = x
            for block in blocks:
                output = block(output, shift=shift)
            loss = loss_fn(output, target)
            torch.autograd.backward(loss / num)
            losses.append(loss.detach())
            outputs.append(output.detach())
    return Outcome(losses, [torch.cat(outputs)], grads_of(dict(enumerate(blocks))))


def grads_of(blocks: Mapping[int, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{stage}.{name}": parameter.grad.clone()
        for stage, block in blocks.items()
        for name, parameter in block.named_parameters()
        if parameter.grad is not None
    }


def torch_stages(schedule: Schedule, rank: int, group: Any = None) -> list[Any]:
    from torch.distributed.pipelining import PipelineStage  # noqa: PLC0415 - takes seconds

    return [
        PipelineStage(Block(stage), stage, schedule.num_stages, torch.device("cpu"), group=group)
        for stage in schedule.stages_of(rank)
    ]


def written_for_torch(schedule: Any, stages: list[Any], rows: int, steps: int) -> Outcome:
    """Train as a program does that was written for torch's schedules."""
    x, target, shift = batch(rows)
    losses: list[Tensor] = []
    outputs, every = [], []
    for _ in range(steps):
        is_first = any(stage.is_first for stage in stages)
        args = (x,) if is_first else ()
        if any(stage.is_last for stage in stages):
            outputs.append(schedule.step(*args, target=target, losses=losses, shift=shift))
            every += losses
        else:
            assert schedule.step(*args, shift=shift) is None
    grads = grads_of({stage.stage_index: stage.submod for stage in stages})
    return Outcome(
        [loss.detach() for loss in every], [output.detach() for output in outputs], grads
    )


def run_here(schedule: Schedule, rows: int = ROWS, steps: int = 1) -> Outcome:
    stages = torch_stages(schedule, dist.get_rank())
    made = as_torch_schedule(schedule, stages, loss_fn=loss_fn)
    return written_for_torch(made, stages, rows, steps)


def run_in_torch(schedule: Schedule, path: Path, form: Any) -> Outcome:
    stages = torch_stages(schedule, dist.get_rank())
    runtime = torch_schedules._PipelineScheduleRuntime(
        stages, schedule.num_microbatches, loss_fn=loss_fn
    )
    runtime._load_csv(str(path), format=form)
    return written_for_torch(runtime, stages, ROWS, 1)


def searched() -> Schedule:
    """Return what a search finds for a heavy last stage: an order that no generator makes."""
    costs = ModelCosts(last_scale=1.5, latency=0.1)
    options: dict[str, Any] = {"virtual": (2,), "placements": ("v",), "num_candidates": 20}
    return search(costs, num_ranks=2, num_microbatches=4, memory_limit=2, **options).schedule


SCHEDULES = {
    "gpipe": gpipe(2, num_microbatches=4),
    "1f1b, fewer microbatches than ranks": one_f_one_b(2, num_microbatches=1),
    "interleaved zero bubble": interleaved_zero_bubble(2, num_microbatches=4),
    "dualpipe v": dualpipe_v(2, num_microbatches=4),
    "searched": searched(),
}


def assert_equal(outcomes: list[Outcome], wanted: Outcome, schedule: Schedule) -> None:
    last = outcomes[schedule.stage_to_rank[-1]]
    assert last.losses
    torch.testing.assert_close(last.losses, wanted.losses, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat(last.outputs), wanted.outputs[0], rtol=1e-12, atol=1e-12)
    grads = {name: grad for outcome in outcomes for name, grad in outcome.grads.items()}
    torch.testing.assert_close(grads, wanted.grads, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_code_written_for_torch_runs_any_schedule_with_the_numbers_of_one_process(
    name: str,
) -> None:
    schedule = SCHEDULES[name]
    outcomes = run_distributed(run_here, schedule, world_size=2)
    assert_equal(outcomes, one_process(schedule), schedule)


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_exported_as_csv_runs_in_torch_with_the_same_result(
    name: str, form: str, tmp_path: Path
) -> None:
    schedule = SCHEDULES[name]
    if OLD_TORCH and any(place[0] == place[1] for place in pairwise(schedule.stage_to_rank)):
        pytest.skip("this torch cannot send shapes between stages of one rank")
    path = tmp_path / "schedule.csv"
    if form == "compute_comms":
        # Where torch divides gradients by the number of microbatches.
        schedule = add_fsdp_reduce_grad(add_send_recv(schedule))
    waits = form == "compute_comms" and hasattr(torch_schedules, "WAIT_SEND_F")
    path.write_text(to_csv(schedule, waits=waits))
    outcomes = run_distributed(run_in_torch, schedule, path, form, world_size=2)
    assert_equal(outcomes, one_process(schedule), schedule)


def test_uneven_batches_and_repeated_steps_are_right_where_those_of_torch_are_not() -> None:
    schedule = interleaved_1f1b(2, num_microbatches=4)
    outcomes = run_distributed(run_here, schedule, 10, 2, world_size=2)
    assert_equal(outcomes, one_process(schedule, rows=10, steps=2), schedule)


def evaluate_between_steps(schedule: Schedule) -> list[dict[str, Tensor]]:
    rank = dist.get_rank()
    stages = torch_stages(schedule, rank)
    specs = {stage: TensorSpec((2, WIDTH), torch.float64) for stage in range(1, 4)}
    made = as_torch_schedule(schedule, stages, loss_fn=loss_fn, input_specs=specs)
    x, target, shift = batch(ROWS)
    args = (x,) if rank == 0 else ()
    losses: list[Tensor] = []
    kept: list[Tensor] = []
    made.step(*args, target=target, losses=losses, shift=shift, return_outputs=False)
    before = grads_of({stage.stage_index: stage.submod for stage in stages})
    output = made.eval(*args, target=target, losses=kept, shift=shift)
    without_target = made.eval(*args, shift=shift)
    if rank == 1:
        assert not output.requires_grad
        torch.testing.assert_close(output, without_target, rtol=0, atol=0)
        torch.testing.assert_close(kept, losses, rtol=0, atol=0)
    else:
        assert output is None
        assert not kept
    after = grads_of({stage.stage_index: stage.submod for stage in stages})
    tripled: list[Tensor] = []
    made.step(*args, target=target, losses=tripled, shift=shift, loss_kwargs={"scale": 3.0})
    assert [float(a / b) for a, b in zip(tripled, losses, strict=True)] == pytest.approx(
        [3.0] * len(losses)
    )
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"grad mode \(off\) must be on"):
        made.step(*args, target=target, shift=shift)
    return [before, after]


def test_evaluation_leaves_gradients_alone() -> None:
    for before, after in run_distributed(
        evaluate_between_steps, interleaved_1f1b(2, num_microbatches=4), world_size=2
    ):
        torch.testing.assert_close(before, after, rtol=0, atol=0)


def run_in_group(schedule: Schedule, sharded: bool) -> Outcome:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    stages = torch_stages(schedule, mesh.get_local_rank("pp"), mesh.get_group("pp"))
    for stage in stages if sharded else ():
        fully_shard(stage.submod, mesh=mesh["dp"])
    made = as_torch_schedule(schedule, stages, loss_fn=loss_fn)
    outcome = written_for_torch(made, stages, ROWS, 1)
    whole = {
        name: grad.full_tensor() if isinstance(grad, DTensor) else grad
        for name, grad in outcome.grads.items()
    }
    return replace(outcome, grads=whole)


@pytest.mark.parametrize("sharded", [False, True])
def test_pipelines_side_by_side_take_the_group_of_their_stages(sharded: bool) -> None:
    schedule = interleaved_zero_bubble(2, num_microbatches=4)
    outcomes = run_distributed(run_in_group, schedule, sharded, world_size=4)
    for pipeline in (outcomes[:2], outcomes[2:]):
        assert_equal(pipeline, one_process(schedule), schedule)


def refusals() -> list[str]:
    from torch.distributed.pipelining import PipelineStage  # noqa: PLC0415

    schedule = gpipe(1, num_microbatches=2)
    plain = torch_stages(schedule, 0)
    builder: Any = lambda: None  # noqa: E731
    with_builder = PipelineStage(Block(0), 0, 1, torch.device("cpu"), dw_builder=builder)
    chains = Schedule.from_steps(
        [[MetaStep(MetaStepType.FWD, stage, 0) for stage in range(2)]],
        stage_to_rank=[0, 0],
        num_microbatches=1,
        chains=[[0], [1]],
    )
    messages = []
    for given, stages in ((schedule, []), (schedule, [with_builder]), (chains, plain)):
        with pytest.raises(ValueError, match="must be") as caught:
            as_torch_schedule(given, stages)
        messages.append(str(caught.value))
    made = as_torch_schedule(schedule, plain)
    output = made.step(torch.ones(4, WIDTH, dtype=torch.float64))
    assert not output.requires_grad
    assert grads_of({0: plain[0].submod}) == {}
    return messages


def test_what_does_not_fit_is_refused_and_without_a_loss_function_steps_run_forward() -> None:
    [messages] = run_distributed(refusals, world_size=1)
    assert messages[0] == "len(stages) (0) must be >= 1"
    assert "dw_builder of stage 0 must be None" in messages[1]
    assert messages[2] == "len(chains) (2) must be 1 for torch's stages"
