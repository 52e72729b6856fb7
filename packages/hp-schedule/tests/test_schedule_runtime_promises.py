"""What a run leaves behind, takes from its caller, and gives wherever its stages are placed."""

import gc
import weakref
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from hp_platform.testing import run_distributed
from hp_schedule import (
    MetaStep,
    MetaStepType,
    Schedule,
    add_fsdp_reduce_grad,
    add_fsdp_unshard_reshard,
    interleaved_1f1b,
    one_f_one_b,
    zbv,
)
from hp_schedule.runtime import (
    FullySharded,
    PipelineContext,
    PipelineSchedule,
    PipelineScheduleRuntime,
    PipelineStage,
    SharedParameterInfo,
    SharedParameters,
    TensorSpec,
    from_schedule,
    share_parameters,
)

WIDTH = 4
SPLIT = "0F0 1F0 1I0 0I0 1W0 0W0 0F1 1F1 1I1 0I1 1W1 0W1"


class Block(nn.Module):
    def __init__(self, seed: int, *, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def stage_of(module: nn.Module, index: int, num_stages: int, **options: Any) -> PipelineStage:
    return PipelineStage(
        module, stage_index=index, num_stages=num_stages, device=torch.device("cpu"), **options
    )


def on_one_rank(
    modules: list[nn.Module], *, schedule: Schedule | None = None, **options: Any
) -> PipelineSchedule:
    """Return what runs two microbatches on this process alone."""
    if schedule is None:
        schedule = interleaved_1f1b(1, num_microbatches=2, num_stages_per_rank=len(modules))
    stages = [stage_of(module, index, len(modules)) for index, module in enumerate(modules)]
    return from_schedule(schedule, stages, **{"loss_fn": loss_fn} | options)


def split_schedule() -> Schedule:
    steps = [MetaStep.from_str(word) for word in SPLIT.split()]
    return Schedule.from_steps([steps], stage_to_rank=[0, 0], num_microbatches=2)


@pytest.mark.parametrize("schedule", [None, split_schedule()])
def test_nothing_of_a_run_waits_for_the_garbage_collector(schedule: Schedule | None) -> None:
    runtime = on_one_rank([Block(0), Block(1)], schedule=schedule)
    values = [torch.ones(2, WIDTH, dtype=torch.float64) for _ in range(4)]
    runtime.run_microbatches([(x,) for x in values[:2]], None, values[2:])  # what is made once
    alive = [weakref.ref(value) for value in values]
    gc.collect()
    gc.disable()
    try:
        runtime.run_microbatches([(x,) for x in values[:2]], None, values[2:])
        values.clear()
        assert [reference() for reference in alive] == [None] * 4
        assert gc.collect() == 0
    finally:
        gc.enable()


class Exact(Block):
    """Computes in full precision wherever it is called."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


@pytest.mark.parametrize("schedule", [None, split_schedule()])
def test_autocast_around_a_run_is_for_its_forwards_alone(schedule: Schedule | None) -> None:
    modules = [Exact(seed, dtype=torch.float32) for seed in range(2)]
    x = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)
    runtime = on_one_rank([*modules], schedule=schedule)
    with torch.autocast("cpu", torch.bfloat16):
        runtime.run(x, target=x)
    found = [module.weight.grad for module in modules]
    for module in modules:
        module.weight.grad = None
    for part in x.chunk(2):
        torch.autograd.backward(loss_fn(modules[1](modules[0](part)), part))
    torch.testing.assert_close(found, [m.weight.grad for m in modules], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("inference", [False, True])
def test_losses_that_lead_nowhere_are_refused(inference: bool) -> None:
    def detached(output: Tensor, target: Tensor) -> Tensor:
        return loss_fn(output, target).detach()

    runtime = on_one_rank([Block(0)], loss_fn=loss_fn if inference else detached)
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    with (
        torch.inference_mode(inference),
        pytest.raises(ValueError, match="losses must require grad to train"),
    ):
        runtime.run(x, target=x)


def test_one_loss_may_lead_nowhere() -> None:
    modules = [Block(0)]
    runtime = on_one_rank(
        [*modules], loss_fn=lambda out, keep: out.sum() if keep[0] else keep.sum()
    )
    runtime.run(torch.ones(2, WIDTH, dtype=torch.float64), target=torch.tensor([True, False]))
    assert modules[0].weight.grad is not None


def test_targets_may_be_one_tensor() -> None:
    runtime = on_one_rank([Block(0)])
    x = torch.ones(2, 3, WIDTH, dtype=torch.float64)
    targets: Any = x
    losses = runtime.run_microbatches([(part,) for part in x], None, targets).losses
    assert runtime.evaluate_microbatches([(part,) for part in x], None, targets).losses == losses


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class TakesPair(Block):
    def forward(self, pair: Any) -> Tensor:
        assert isinstance(pair, Pair)
        assert len(pair.x) == len(pair.y) == 1
        return super().forward(pair.x + pair.y)


def test_named_tuples_are_cut_like_tuples() -> None:
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    assert len(on_one_rank([TakesPair(0)]).run(Pair(x, x), target=x).losses) == 2


class Summed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum()


def test_outputs_that_are_scalars_are_put_together_as_a_vector() -> None:
    runtime = on_one_rank([Summed(0)], loss_fn=None)
    assert runtime.evaluate(torch.ones(2, WIDTH, dtype=torch.float64)).output.shape == (2,)


def test_an_overlap_that_is_run_as_a_whole_by_its_function_is_one_span() -> None:
    def whole(step: MetaStep, context: PipelineContext) -> None:
        context.run(step)

    schedule = interleaved_1f1b(1, num_microbatches=4, num_stages_per_rank=2, overlap_b_f=True)
    runtime = on_one_rank([Block(0), Block(1)], schedule=schedule)
    runtime.register_custom_function(MetaStepType.OVERLAP_B_F, whole)
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    steps = [str(span.step) for span in runtime.run(x, target=x).timeline]
    assert len(set(steps)) == len(steps)


def reaches_weight(schedule: Schedule) -> dict[int, bool]:
    """Tell by stage whether its weight got a gradient; stage 2 says that none goes back from it."""
    spec = TensorSpec((1, WIDTH), torch.float64)
    no_grad = TensorSpec((1, WIDTH), torch.float64, requires_grad=False)
    stages = [
        stage_of(Block(index), index, 4, input_spec={0: None, 2: no_grad}.get(index, spec))
        for index in schedule.stages_of(dist.get_rank())
    ]
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    runtime = from_schedule(schedule, stages, loss_fn=loss_fn)
    runtime.run(*([x] if dist.get_rank() == 0 else []), target=x)
    grads = {stage.stage_index: stage.module.get_parameter("weight").grad for stage in stages}
    return {index: grad is not None and bool(grad.any()) for index, grad in grads.items()}


def frozen_tied() -> list[bool]:
    """Tie two stages, the first of which is frozen, by one parameter; return what trains."""
    rank = dist.get_rank()
    module = nn.Sequential(Block(rank), Block(rank + 2))
    module[0].get_parameter("weight").requires_grad_(rank == 1)
    infos = [SharedParameterInfo({0: "0.weight", 1: "0.weight"})]
    schedule = one_f_one_b(2, num_microbatches=2)
    runtime = from_schedule(
        schedule, [stage_of(module, rank, 2)], loss_fn=loss_fn, shared_parameters=infos
    )
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    runtime.run(*([x] if rank == 0 else []), target=x)
    return [parameter.grad is not None for parameter in module.parameters()]


def tied_and_sharded(*, shares_first: bool) -> list[Tensor]:
    """Train three stages of one rank, the outer two tied, each sharded over two ranks."""
    schedule = add_fsdp_unshard_reshard(
        add_fsdp_reduce_grad(interleaved_1f1b(1, num_microbatches=2, num_stages_per_rank=3))
    )
    mesh, modules = init_device_mesh("cpu", (2,)), [Block(seed) for seed in range(3)]
    stages = [stage_of(module, index, 3) for index, module in enumerate(modules)]

    def share() -> SharedParameters:
        infos = [SharedParameterInfo({0: "weight", 2: "weight"})]
        return share_parameters(infos, stages, schedule=schedule)

    shared = share() if shares_first else None
    for module in modules:
        sharded: FSDPModule = fully_shard(module, mesh=mesh)
        sharded.set_gradient_divide_factor(1.0)
    runtime = PipelineScheduleRuntime(
        stages,
        schedule,
        pipeline_rank=0,
        loss_fn=loss_fn,
        sharding=FullySharded(stages),
        shared_parameters=share() if shared is None else shared,
    )
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.01)
    x = inputs().chunk(2)[dist.get_rank()]
    # Without other ranks in the pipeline a run that fails can be followed by others.
    with suppress(RuntimeError):
        runtime.run(x, target=torch.ones(3, WIDTH + 1))
    optimizer.zero_grad()
    for _ in range(3):
        runtime.run(x[:2], target=x[:2])
        runtime.run(x[2:], target=x[2:])
        optimizer.step()
        optimizer.zero_grad()
    weights = [module.get_parameter("weight").detach() for module in modules]
    return [weight.full_tensor() for weight in weights if isinstance(weight, DTensor)]


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 8 * WIDTH, dtype=torch.float64).reshape(8, WIDTH)


ORDERS = {
    "other order": (("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"), ("0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0")),
    "other overlap": (
        ("0F0 (0F1;0B0)OVERLAP_F_B 0B1", "1F0 1B0 1F1 1B1"),
        ("0F0 (0B0;0F1)OVERLAP_B_F 0B1", "1F0 1B0 1F1 1B1"),
    ),
}


def other_order(name: str) -> str:
    """Let rank 1 take its microbatches in another order than rank 0 does; return what is raised."""
    rows = ORDERS[name][dist.get_rank()]
    schedule = Schedule.from_steps(
        [[MetaStep.from_str(word) for word in row.split()] for row in rows],
        stage_to_rank=[0, 1],
        num_microbatches=2,
    )
    try:
        from_schedule(schedule, stage_of(Block(0), dist.get_rank(), 2), loss_fn=loss_fn)
    except ValueError as error:
        return str(error)
    return "no error"


def everything() -> dict[str, Any]:
    return {
        **{name: other_order(name) for name in ORDERS},
        "loop": reaches_weight(interleaved_1f1b(2, num_microbatches=2, num_stages_per_rank=2)),
        "v": reaches_weight(zbv(2, num_microbatches=2)),
        "frozen": frozen_tied(),
        "shared first": tied_and_sharded(shares_first=True),
        "sharded first": tied_and_sharded(shares_first=False),
    }


@cache
def results() -> list[dict[str, Any]]:
    return run_distributed(everything, world_size=2)


@pytest.mark.parametrize("placement", ["loop", "v"])
def test_what_a_stage_expects_holds_wherever_the_stage_before_it_is(placement: str) -> None:
    reached = results()[0][placement] | results()[1][placement]
    assert reached == {0: False, 1: False, 2: True, 3: True}


def test_an_output_that_a_stage_of_the_same_rank_does_not_expect_is_refused() -> None:
    stages = [stage_of(Block(0), 0, 2), stage_of(Block(1), 1, 2, input_spec=TensorSpec((3, 5)))]
    schedule = interleaved_1f1b(1, num_microbatches=1, num_stages_per_rank=2)
    with pytest.raises(ValueError, match=r"output \(\[8, 4\] float64\) of stage 0, microbatch 0"):
        from_schedule(schedule, stages, loss_fn=loss_fn).run(inputs(), target=inputs())


def test_tied_parameters_are_frozen_where_the_first_is() -> None:
    # The first parameter of each rank is the tied one.
    assert [rank["frozen"] for rank in results()] == [[False, True]] * 2


@pytest.mark.parametrize("order", ["shared first", "sharded first"])
def test_tied_parameters_of_one_rank_stay_one_when_they_are_sharded(order: str) -> None:
    modules = [Block(seed) for seed in range(3)]
    modules[2].weight = modules[0].weight
    optimizer = torch.optim.SGD([modules[0].weight, modules[1].weight], lr=0.01)
    for _ in range(3):
        output = inputs()
        for module in modules:
            output = module(output)
        torch.autograd.backward(loss_fn(output, inputs()))
        optimizer.step()
        optimizer.zero_grad()
    expected = [module.weight.detach() for module in modules]
    for rank in results():
        torch.testing.assert_close(rank[order], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_with_different_schedules_are_refused_on_all_of_them(order: str) -> None:
    for rank in results():
        assert rank[order].startswith("schedule of rank 1 must equal that of rank 0")
