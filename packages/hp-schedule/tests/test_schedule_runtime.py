"""The torch runtime against one process."""

import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hp_platform import irecv, isend, linear
from hp_platform.testing import run_distributed
from hp_schedule import (
    MetaStep,
    MetaStepType,
    Schedule,
    Timeline,
    add_send_recv,
    forward_only,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
)
from hp_schedule.runtime import (
    PipelineContext,
    PipelineScheduleRuntime,
    PipelineStage,
    TensorSpec,
    TorchTransport,
    build_edge_groups,
    transport,
)
from hp_schedule.runtime.batch import Recorder

WIDTH, ROWS = 6, 3


class Block(nn.Module):
    """A residual layer whose weight gradient can be put off, and a scale whose cannot."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)
        self.weight = nn.Parameter(weight)
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        return x + torch.tanh(linear(x, self.weight)) * self.scale + shift


@dataclass(frozen=True)
class Outcome:
    losses: list[Tensor]
    grads: dict[str, Tensor]
    outputs: list[Tensor]
    timeline: Timeline
    steps: list[str]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def microbatches(num: int) -> tuple[list[tuple[Tensor]], list[dict[str, Any]], list[Tensor]]:
    generator = torch.Generator().manual_seed(99)
    shape = (num, 2, ROWS, WIDTH)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    kwargs = [{"shift": 0.1 * index} for index in range(num)]
    return [(x,) for x in values[:, 0]], kwargs, list(values[:, 1])


def make_stages(schedule: Schedule, rank: int, blocks: dict[int, nn.Module]) -> list[PipelineStage]:
    spec = TensorSpec((ROWS, WIDTH), torch.float64)
    return [
        PipelineStage(
            blocks[stage],
            stage_index=stage,
            num_stages=schedule.num_stages,
            device=torch.device("cpu"),
            input_spec=spec if stage else None,
        )
        for stage in schedule.stages_of(rank)
    ]


def make_runtime(
    schedule: Schedule, blocks: dict[int, nn.Module], **options: Any
) -> PipelineScheduleRuntime:
    rank = dist.get_rank() if dist.is_initialized() else 0
    transport = None
    if schedule.edges:
        groups = build_edge_groups([range(schedule.num_ranks)])
        transport = TorchTransport(schedule, rank_of=range(schedule.num_ranks), groups=groups)
    return PipelineScheduleRuntime(
        make_stages(schedule, rank, blocks),
        schedule,
        pipeline_rank=rank,
        transport=transport,
        loss_fn=options.pop("loss_fn", loss_fn),
        **options,
    )


def run_rank(schedule: Schedule, repeats: int = 1) -> Outcome:
    rank = dist.get_rank() if dist.is_initialized() else 0
    blocks: dict[int, nn.Module] = {stage: Block(stage) for stage in schedule.stages_of(rank)}
    steps: list[str] = []
    runtime = make_runtime(schedule, blocks, on_step=lambda step: steps.append(str(step)))
    args, kwargs, targets = microbatches(schedule.num_microbatches)
    for _ in range(repeats):
        result = runtime.run_microbatches(args, kwargs, targets)
    return Outcome(
        losses=result.losses,
        grads=_grads(blocks),
        outputs=result.outputs,
        timeline=result.timeline,
        steps=steps,
    )


def _grads(blocks: dict[int, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{stage}.{name}": parameter.grad
        for stage, block in blocks.items()
        for name, parameter in block.named_parameters()
        if parameter.grad is not None
    }


def one_process(num_stages: int, num: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    blocks: dict[int, nn.Module] = {stage: Block(stage) for stage in range(num_stages)}
    losses = []
    for (x,), kwargs, target in zip(*microbatches(num), strict=True):
        output = x
        for block in blocks.values():
            output = block(output, **kwargs)
        loss = loss_fn(output, target)
        torch.autograd.backward(loss)
        losses.append(loss.detach())
    return losses, _grads(blocks)


def split_backwards(schedule: Schedule) -> Schedule:
    """Replace every backward by its two halves, the second two steps later."""
    rows: list[list[MetaStep]] = []
    for row in schedule.steps:
        steps: list[MetaStep] = []
        late: list[MetaStep] = []
        for step in row:
            if step is not None and step.type is MetaStepType.BWD:
                indices = (step.stage_index, step.microbatch_index)
                steps.append(MetaStep(MetaStepType.BWD_INPUT, *indices))
                late.append(MetaStep(MetaStepType.BWD_WEIGHT, *indices))
                if len(late) > 2:
                    steps.append(late.pop(0))
            elif step is not None:
                steps.append(step)
        rows.append([*steps, *late])
    return Schedule.from_steps(
        rows, stage_to_rank=schedule.stage_to_rank, num_microbatches=schedule.num_microbatches
    )


def v_shape(num: int) -> Schedule:
    """GPipe over four stages on two ranks, folded: stages 1 and 2 are neighbours on rank 1."""
    rows = []
    for first, second in ((0, 3), (1, 2)):
        order = (("F", first), ("F", second), ("B", second), ("B", first))
        rows.append(
            [
                MetaStep(MetaStepType(kind), stage, microbatch)
                for kind, stage in order
                for microbatch in range(num)
            ]
        )
    return Schedule.from_steps(rows, stage_to_rank=[0, 1, 1, 0], num_microbatches=num)


SCHEDULES = {
    "gpipe 2x4": gpipe(2, num_microbatches=4),
    "gpipe 4x2": gpipe(4, num_microbatches=2),
    "1f1b 2x3": one_f_one_b(2, num_microbatches=3),
    "1f1b 4x6": one_f_one_b(4, num_microbatches=6),
    "1f1b 4x1": one_f_one_b(4, num_microbatches=1),
    "interleaved 2x5": interleaved_1f1b(2, num_microbatches=5),
    "interleaved 2x1": interleaved_1f1b(2, num_microbatches=1),
    "interleaved 4x6": interleaved_1f1b(4, num_microbatches=6),
    "interleaved 4x3": interleaved_1f1b(4, num_microbatches=3, num_stages_per_rank=3),
    "split 4x5": split_backwards(one_f_one_b(4, num_microbatches=5)),
    "folded 2x3": v_shape(3),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_losses_and_gradients_are_bitwise_those_of_one_process(name: str) -> None:
    schedule = add_send_recv(SCHEDULES[name])
    outcomes = run_distributed(run_rank, schedule, world_size=schedule.num_ranks)
    losses, grads = one_process(schedule.num_stages, schedule.num_microbatches)
    last = outcomes[schedule.stage_to_rank[-1]]
    torch.testing.assert_close(last.losses, losses, rtol=0, atol=0)
    found = {key: value for outcome in outcomes for key, value in outcome.grads.items()}
    torch.testing.assert_close(found, grads, rtol=0, atol=0)


def test_one_rank_runs_several_stages_without_any_process_group() -> None:
    outcome = run_rank(interleaved_1f1b(1, num_microbatches=3, num_stages_per_rank=3))
    losses, grads = one_process(3, 3)
    torch.testing.assert_close(outcome.losses, losses, rtol=0, atol=0)
    torch.testing.assert_close(outcome.grads, grads, rtol=0, atol=0)


def test_gradients_accumulate_over_runs() -> None:
    once = run_rank(one_f_one_b(1, num_microbatches=2))
    twice = run_rank(one_f_one_b(1, num_microbatches=2), repeats=2)
    for name, grad in once.grads.items():
        torch.testing.assert_close(twice.grads[name], 2 * grad, rtol=1e-15, atol=0)


def test_a_forward_only_run_returns_outputs_and_touches_no_gradient() -> None:
    schedule = add_send_recv(forward_only(2, num_microbatches=3, num_stages_per_rank=2))
    first, last = run_distributed(run_rank, schedule, world_size=2)
    assert first.outputs == []
    assert first.grads == last.grads == {}
    expected, _ = one_process(4, 3)
    _, _, targets = microbatches(3)
    for output, target, loss in zip(last.outputs, targets, expected, strict=True):
        assert not output.requires_grad
        torch.testing.assert_close(loss_fn(output, target), loss, rtol=0, atol=0)
    torch.testing.assert_close(last.losses, expected, rtol=0, atol=0)


def test_the_timeline_has_every_compute_step_of_every_rank_on_one_clock() -> None:
    schedule = add_send_recv(one_f_one_b(2, num_microbatches=3))
    outcomes = run_distributed(run_rank, schedule, world_size=2)
    timeline = Timeline(span for outcome in outcomes for span in outcome.timeline)
    assert timeline.num_ranks == 2
    for rank, row in enumerate(schedule.steps):
        computed = [s.step for s in timeline if s.rank == rank and s.step.type.is_compute]
        assert computed == [step for step in row if step is not None and step.type.is_compute]
    ends = {str(span.step): span.end for span in timeline if span.step.type.is_compute}
    starts = {str(span.step): span.start for span in timeline if span.step.type.is_compute}
    assert ends["0F2"] <= starts["1F2"] + 1e-3
    assert ends["1B2"] <= starts["0B2"] + 1e-3


def test_a_thread_that_waits_between_two_clocks_does_not_shift_a_timeline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    delays = [0.3, 0.0, 2.0, 0.1, 0.2]
    monkeypatch.setattr(time, "perf_counter", itertools.count().__next__)
    monkeypatch.setattr(time, "time", lambda: 1000 + time.perf_counter() - 1 + delays.pop())
    recorder = Recorder(0, torch.device("cpu"))
    recorder.add(MetaStep.from_str("0F0"), recorder.mark())
    assert [(span.start, span.end) for span in recorder.timeline()] == [(1001.0, 1002.0)]


def test_on_step_is_told_of_every_step_in_order() -> None:
    schedule = add_send_recv(one_f_one_b(2, num_microbatches=2))
    outcomes = run_distributed(run_rank, schedule, world_size=2)
    for row, outcome in zip(schedule.steps, outcomes, strict=True):
        assert outcome.steps == list(map(str, row))


def run_replica(schedule: Schedule) -> dict[str, Tensor]:
    """Two pipelines of two ranks, interleaved over the world."""
    pipelines = [[0, 2], [1, 3]]
    world_rank = dist.get_rank()
    pipeline = next(ranks for ranks in pipelines if world_rank in ranks)
    rank = pipeline.index(world_rank)
    groups = build_edge_groups(pipelines)
    blocks: dict[int, nn.Module] = {stage: Block(stage) for stage in schedule.stages_of(rank)}
    runtime = PipelineScheduleRuntime(
        make_stages(schedule, rank, blocks),
        schedule,
        pipeline_rank=rank,
        transport=TorchTransport(schedule, rank_of=pipeline, groups=groups),
        loss_fn=loss_fn,
    )
    runtime.run_microbatches(*microbatches(schedule.num_microbatches))
    return _grads(blocks)


def test_pipelines_side_by_side_do_not_disturb_each_other() -> None:
    schedule = add_send_recv(interleaved_1f1b(2, num_microbatches=3))
    found = run_distributed(run_replica, schedule, world_size=4)
    _, grads = one_process(4, 3)
    torch.testing.assert_close({**found[0], **found[2]}, grads, rtol=0, atol=0)
    torch.testing.assert_close({**found[1], **found[3]}, grads, rtol=0, atol=0)


def messages_of_building(pipelines: list[list[int]]) -> list[tuple[str, int, int]]:
    """Direction, peer and group size of what this rank sends and receives."""
    found: list[tuple[str, int, int]] = []

    def recorded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def record(x: Tensor, peer: int, *, group: dist.ProcessGroup) -> Any:
            found.append((name, peer, group.size()))
            return call(x, peer, group=group)

        return record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "isend", recorded("to", isend))
        patch.setattr(transport, "irecv", recorded("from", irecv))
        build_edge_groups(pipelines)
    return found


def test_every_edge_is_connected_when_it_is_built() -> None:
    found = run_distributed(messages_of_building, [[0, 2, 1]], world_size=3)
    # Edges by places in the pipeline: 0-1, 1-0, 0-2, 2-0, 1-2, 2-1.
    assert found[0] == [("to", 2, 2), ("from", 2, 2), ("to", 1, 2), ("from", 1, 2)]
    assert found[2] == [("from", 0, 2), ("to", 0, 2), ("to", 1, 2), ("from", 1, 2)]
    assert found[1] == [("from", 0, 2), ("to", 0, 2), ("from", 2, 2), ("to", 2, 2)]


class Detached(nn.Module):
    """A frozen stage whose output does not depend on its input, as far as autograd knows."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach() * 2


def run_with_frozen_stage(frozen: int) -> dict[str, Tensor]:
    schedule = add_send_recv(one_f_one_b(3, num_microbatches=2))
    rank = dist.get_rank()
    block = Detached() if rank == frozen else Block(rank)
    runtime = make_runtime(schedule, {rank: block})
    args, _, targets = microbatches(2)
    runtime.run_microbatches(args, None, targets)
    return _grads({rank: block})


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_stage_whose_output_needs_no_gradient_passes_zeros_on(frozen: int) -> None:
    found = run_distributed(run_with_frozen_stage, frozen, world_size=3)
    for rank, grads in enumerate(found):
        if rank == frozen:
            assert grads == {}
        for grad in grads.values():
            assert bool(grad.any()) == (rank > frozen)


class Watched(nn.Module):
    """Counts how many of its own outputs are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(0)
        self.outputs: list[weakref.ref[Tensor]] = []
        self.peak = 0

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.block(x)
        self.outputs.append(weakref.ref(output))
        self.peak = max(self.peak, self.alive())
        return output

    def alive(self) -> int:
        return sum(reference() is not None for reference in self.outputs)


def run_watched(num: int) -> tuple[int, int]:
    schedule = add_send_recv(one_f_one_b(3, num_microbatches=num))
    module = Watched()
    runtime = make_runtime(schedule, {dist.get_rank(): module})
    args, _, targets = microbatches(num)
    result = runtime.run_microbatches(args, None, targets)
    peak, alive = module.peak, module.alive()
    del result
    return peak, alive


def test_activations_live_only_from_forward_to_backward() -> None:
    found = run_distributed(run_watched, 7, world_size=3)
    # The last rank's loss replaces its output; a rank's own microbatch in flight counts.
    assert [peak for peak, _ in found] == [3, 2, 1]
    assert [alive for _, alive in found] == [0, 0, 0]


def test_a_registered_function_may_run_the_halves_of_an_overlap_in_threads() -> None:
    seen: list[str] = []

    def together(step: MetaStep, context: PipelineContext) -> None:
        seen.append(str(step))
        with ThreadPoolExecutor() as pool:
            list(pool.map(context.run, step.sub_steps))

    text = "0F0 1F0 1B0 (0B0;0F1)OVERLAP_B_F 1F1 1B1 0B1"
    schedule = Schedule.from_steps(
        [[MetaStep.from_str(word) for word in text.split()]],
        stage_to_rank=[0, 0],
        num_microbatches=2,
    )
    blocks: dict[int, nn.Module] = {stage: Block(stage) for stage in (0, 1)}
    runtime = make_runtime(schedule, blocks)
    runtime.register_custom_function(MetaStepType.OVERLAP_B_F, together)
    runtime.run_microbatches(*microbatches(2))
    assert seen == ["(0B0;0F1)OVERLAP_B_F"]
    torch.testing.assert_close(_grads(blocks), one_process(2, 2)[1], rtol=0, atol=0)


def test_fsdp_steps_go_to_the_registered_function_and_are_refused_without() -> None:
    steps = [MetaStep.from_str(t) for t in ("0UNSHARD", "0F0", "0B0", "0REDUCE_GRAD", "0RESHARD")]
    schedule = Schedule.from_steps([steps], stage_to_rank=[0], num_microbatches=1)
    runtime = make_runtime(schedule, {0: Block(0)})
    with pytest.raises(RuntimeError, match="must be registered for FSDP_UNSHARD"):
        runtime.run_microbatches(*microbatches(1))
    seen: list[str] = []
    for kind in (kind for kind in MetaStepType if kind.is_fsdp):
        runtime.register_custom_function(kind, lambda step, _: seen.append(str(step)))
    runtime.run_microbatches(*microbatches(1))
    assert seen == ["0UNSHARD", "0REDUCE_GRAD", "0RESHARD"]


def _runtime_of(schedule: Schedule, stages: Sequence[int], **options: Any) -> object:
    num = schedule.num_stages
    spec = TensorSpec((1,))
    made = [
        PipelineStage(
            Block(stage),
            stage_index=stage,
            num_stages=num,
            device=torch.device("cpu"),
            input_spec=spec if stage else None,
        )
        for stage in stages
    ]
    return PipelineScheduleRuntime(made, schedule, pipeline_rank=0, **options)


@pytest.mark.parametrize(
    ("schedule", "stages", "options", "message"),
    [
        (
            interleaved_1f1b(1, num_microbatches=1),
            [0],
            {"loss_fn": loss_fn},
            r"stages \(\[0\]\) must be those that the schedule places on rank 0 \(\[0, 1\]\)",
        ),
        (
            add_send_recv(gpipe(2, num_microbatches=1)),
            [0],
            {"loss_fn": loss_fn},
            r"transport \(None\) must be given",
        ),
    ],
)
def test_what_does_not_fit_the_schedule_is_refused(
    schedule: Schedule, stages: list[int], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _runtime_of(schedule, stages, **options)


@pytest.mark.parametrize("given", [2, 4])
@pytest.mark.parametrize("name", ["args", "kwargs", "targets"])
def test_every_microbatch_has_its_own_arguments(name: str, given: int) -> None:
    runtime = make_runtime(gpipe(1, num_microbatches=3), {0: Block(0)})
    args, kwargs, targets = microbatches(3)
    values: dict[str, list[Any]] = {"args": [*args], "kwargs": kwargs, "targets": targets}
    values[name] = (values[name] * 2)[:given]
    message = rf"len\({name}\) \({given}\) must equal num_microbatches \(3\)"
    with pytest.raises(ValueError, match=message):
        runtime.run_microbatches(values["args"], values["kwargs"], values["targets"])


def test_training_needs_targets() -> None:
    runtime = make_runtime(gpipe(1, num_microbatches=1), {0: Block(0)})
    args, kwargs, _ = microbatches(1)
    with pytest.raises(ValueError, match=r"targets \(None\) must be given"):
        runtime.run_microbatches(args, kwargs)


@pytest.mark.parametrize(
    ("index", "spec", "message"),
    [
        (2, None, r"stage_index \(2\) must be >= 0 and < num_stages \(2\)"),
        (-1, None, r"stage_index \(-1\) must be >= 0 and < num_stages \(2\)"),
    ],
)
def test_a_stage_knows_its_place_and_its_input(
    index: int, spec: TensorSpec | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PipelineStage(
            Block(0),
            stage_index=index,
            num_stages=2,
            device=torch.device("cpu"),
            input_spec=spec,
        )
