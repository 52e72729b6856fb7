"""FSDP2 under a schedule: data parallel 2 x pipeline 2 against one process."""

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hp_platform.testing import run_distributed
from hp_schedule import (
    MetaStep,
    MetaStepType,
    Schedule,
    add_fsdp_reduce_grad,
    add_fsdp_unshard_reshard,
    add_offload,
    add_recompute,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
)
from hp_schedule.runtime import (
    FullySharded,
    GraphCuttingSplitter,
    PipelineContext,
    PipelineStage,
    TensorSpec,
    defer_weight_gradients,
    from_schedule,
)

WIDTH, ROWS = 6, 2
FWD, BWD = MetaStepType.FWD, MetaStepType.BWD
BWD_INPUT, BWD_WEIGHT = MetaStepType.BWD_INPUT, MetaStepType.BWD_WEIGHT


class Block(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        with torch.no_grad():
            self.linear.weight.normal_(generator=generator)
            self.linear.bias.normal_(generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + torch.tanh(self.linear(x)) * self.scale
        return y


class Stage(nn.Module):
    """Two blocks that are sharded one by one, and a layer of the stage itself."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(10 * seed), Block(10 * seed + 1)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.norm(x)
        return y


class Collectives(TorchDispatchMode):
    """Counts collectives by the step that launches them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.step: MetaStep | None = None
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and ("gather" in name or "reduce" in name):
            assert self.step is not None
            self.counts[f"{self.step.type.value} {name.strip('_')}"] += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Outcome:
    losses: list[Tensor]
    grads: dict[str, Tensor]
    collectives: Counter[str]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def batch(num: int, part: int) -> tuple[list[tuple[Tensor]], list[Tensor]]:
    generator = torch.Generator().manual_seed(7 + part)
    x = torch.randn(num, 2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return [(value,) for value in x[:, 0]], list(x[:, 1])


def one_process(schedule: Schedule, repeats: int) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """Return the losses of both data-parallel parts and the sum of their gradients."""
    stages = nn.ModuleList(Stage(index) for index in range(schedule.num_stages)).double()
    losses: list[list[Tensor]] = []
    for part in range(2):
        losses.append([])
        inputs, targets = batch(schedule.num_microbatches, part)
        for _ in range(repeats):
            for (x,), target in zip(inputs, targets, strict=True):
                loss = loss_fn(nn.Sequential(*stages)(x), target)
                torch.autograd.backward(loss)
                losses[-1].append(loss.detach())
    grads = {name: x.grad for name, x in stages.named_parameters() if x.grad is not None}
    return losses, grads


def sharded(index: int, mesh: DeviceMesh, *, split: str, shard_root: bool) -> Stage:
    module = Stage(index).double()
    if split == "defer":
        defer_weight_gradients(module)
    for inner in [*module.blocks, *([module] if shard_root else [])]:
        fully_shard(inner, mesh=mesh)
        assert isinstance(inner, FSDPModule)
        inner.set_gradient_divide_factor(1.0)
    return module


def make_stage(schedule: Schedule, index: int, module: nn.Module, split: str) -> PipelineStage:
    return PipelineStage(
        module,
        stage_index=index,
        num_stages=schedule.num_stages,
        device=torch.device("cpu"),
        input_spec=TensorSpec((ROWS, WIDTH), torch.float64) if index else None,
        splitter=GraphCuttingSplitter() if split == "cut" else None,
    )


def run_rank(schedule: Schedule, split: str, repeats: int, shard_root: bool) -> Outcome:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    stages = []
    for index in schedule.stages_of(rank % 2):
        module = sharded(index, mesh["dp"], split=split, shard_root=shard_root)
        stages.append(make_stage(schedule, index, module, split))
    collectives = Collectives()
    runtime = from_schedule(
        schedule,
        stages,
        pipelines=mesh["pp"],
        loss_fn=loss_fn,
        sharding=FullySharded(stages),
        on_step=lambda step: setattr(collectives, "step", step),
    )
    inputs, targets = batch(schedule.num_microbatches, rank // 2)
    losses: list[Tensor] = []
    for _ in range(repeats):
        with collectives:
            result = runtime.run_microbatches(inputs, None, targets)
        losses += result.losses
    before = collectives.counts.copy()
    with collectives:
        evaluated = runtime.evaluate(
            torch.cat([x for (x,) in inputs]), target=torch.cat(targets)
        ).losses
    torch.testing.assert_close(evaluated, losses[: len(evaluated)], rtol=1e-12, atol=1e-12)
    assert {key.split()[0] for key in (collectives.counts - before)} <= {"UNSHARD"}
    return Outcome(losses, whole_grads(stages, mesh), before)


def whole_grads(stages: Sequence[PipelineStage], mesh: DeviceMesh) -> dict[str, Tensor]:
    """Return the gradients over both parts, of sharded parameters and of others."""
    grads = {}
    for stage in stages:
        for name, parameter in stage.module.named_parameters():
            grad = parameter.grad
            if isinstance(grad, DTensor):
                grads[f"{stage.stage_index}.{name}"] = grad.full_tensor()
            elif grad is not None:
                dist.all_reduce(grad, group=mesh.get_group("dp"))
                grads[f"{stage.stage_index}.{name}"] = grad
    return grads


def leaf(kind: MetaStepType, stage: int, microbatch: int | None = None) -> MetaStep:
    return MetaStep(kind, stage, microbatch)


def with_fsdp(schedule: Schedule, max_active_stages: int) -> Schedule:
    reduced = add_fsdp_reduce_grad(schedule)
    return add_fsdp_unshard_reshard(reduced, max_active_stages=max_active_stages)


def split_backwards(schedule: Schedule) -> Schedule:
    """Put every weight gradient at the end of its row, last microbatch first."""
    rows = []
    for row in schedule.steps:
        steps = [step for step in row if step is not None]
        late = [
            leaf(BWD_WEIGHT, s.stage_index or 0, s.microbatch_index) for s in steps if s.type is BWD
        ]
        early = [
            leaf(BWD_INPUT, s.stage_index or 0, s.microbatch_index) if s.type is BWD else s
            for s in steps
        ]
        rows.append([*early, *late[::-1]])
    return Schedule.from_steps(
        rows, stage_to_rank=schedule.stage_to_rank, num_microbatches=schedule.num_microbatches
    )


def overlapped() -> Schedule:
    """Return 1F1B over two ranks, three microbatches, with a backward in each later forward."""
    both = MetaStep(MetaStepType.OVERLAP_B_F, sub_steps=(leaf(BWD, 0, 0), leaf(FWD, 0, 2)))
    pair = MetaStep(MetaStepType.OVERLAP_F_B, sub_steps=(leaf(FWD, 1, 2), leaf(BWD_INPUT, 1, 1)))
    rows = [
        [leaf(FWD, 0, 0), leaf(FWD, 0, 1), both, leaf(BWD, 0, 1), leaf(BWD, 0, 2)],
        [
            leaf(FWD, 1, 0),
            leaf(BWD, 1, 0),
            leaf(FWD, 1, 1),
            pair,
            leaf(BWD, 1, 2),
            leaf(BWD_WEIGHT, 1, 1),
        ],
    ]
    return Schedule.from_steps(rows, stage_to_rank=[0, 1], num_microbatches=3)


SCHEDULES = {
    "1f1b": one_f_one_b(2, num_microbatches=3),
    "interleaved": interleaved_1f1b(2, num_microbatches=3),
    "split": split_backwards(interleaved_1f1b(2, num_microbatches=2)),
    "overlap": overlapped(),
    "retaining": add_offload(
        add_recompute(interleaved_1f1b(2, num_microbatches=3), [(0, 1), (1, 2), (3, 1)]),
        [(0, 0), (0, 2), (1, 1), (2, 0)],
    ),
}
CASES = [
    ("1f1b", "none", 3, True),
    ("interleaved", "none", 1, True),
    ("split", "defer", 2, True),
    ("split", "cut", 1, True),
    ("overlap", "defer", 1, False),
    ("retaining", "none", 1, True),
]


@pytest.mark.parametrize(("name", "split", "max_active_stages", "shard_root"), CASES)
def test_gradients_are_those_of_one_process_and_only_fsdp_steps_communicate(
    name: str, split: str, max_active_stages: int, shard_root: bool
) -> None:
    schedule, repeats = with_fsdp(SCHEDULES[name], max_active_stages), 2
    outcomes = run_distributed(run_rank, schedule, split, repeats, shard_root, world_size=4)
    losses, grads = one_process(schedule, repeats)
    torch.testing.assert_close([outcomes[1].losses, outcomes[3].losses], losses)
    for rank, outcome in enumerate(outcomes):
        placed = schedule.stages_of(rank % 2)
        mine = {key: grad for key, grad in grads.items() if int(key[0]) in placed}
        torch.testing.assert_close(outcome.grads, mine, rtol=1e-12, atol=1e-12)
        assert {key.split()[0] for key in outcome.collectives} == {"UNSHARD", "REDUCE_GRAD"}
        scattered = [n for key, n in outcome.collectives.items() if key.startswith("REDUCE_GRAD")]
        modules = (2 + shard_root) * len(placed)
        assert scattered == [modules * repeats], "each module reduces once in a run"


class Waiting(Block):
    """Lets a backward in another thread finish while its forward is under way."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.entered, self.go_on = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.entered.set()
        assert self.go_on.wait(timeout=10)
        return super().forward(x)


def run_in_two_threads() -> dict[str, Tensor]:
    """Run the backward of microbatch 0 inside the forward of microbatch 1, on one stage."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = nn.Sequential(Waiting(0), Block(1)).double()
    waiting: Any = module[0]
    for inner in (*module, module):
        fully_shard(inner, mesh=mesh)
    pair = MetaStep(MetaStepType.OVERLAP_B_F, sub_steps=(leaf(BWD, 0, 0), leaf(FWD, 0, 1)))
    schedule = Schedule.from_steps(
        [[leaf(FWD, 0, 0), pair, leaf(BWD, 0, 1)]], stage_to_rank=[0], num_microbatches=2
    )
    schedule = with_fsdp(schedule, 1)
    stages = [make_stage(schedule, 0, module, "none")]
    collectives = Collectives()
    runtime = from_schedule(
        schedule,
        stages,
        pipelines=[[0], [1]],
        loss_fn=loss_fn,
        sharding=FullySharded(stages),
        on_step=lambda step: setattr(collectives, "step", step),
    )

    def overlap(step: MetaStep, context: PipelineContext) -> None:
        backward, forward = step.sub_steps
        waiting.entered.clear()
        waiting.go_on.clear()
        with ThreadPoolExecutor(1) as pool:
            going = pool.submit(context.run, forward)
            assert waiting.entered.wait(timeout=10)
            context.run(backward)
            waiting.go_on.set()
            going.result(timeout=10)

    runtime.register_custom_function(MetaStepType.OVERLAP_B_F, overlap)
    waiting.go_on.set()
    inputs, targets = batch(2, dist.get_rank())
    with collectives:
        runtime.run_microbatches(inputs, None, targets)
    assert {key.split()[0] for key in collectives.counts} == {"UNSHARD", "REDUCE_GRAD"}
    grads = {}
    for name, parameter in module.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        grads[name] = parameter.grad.full_tensor()
    return grads


def test_overlap_in_two_threads_on_one_stage_keeps_its_parameters() -> None:
    module = nn.Sequential(Block(0), Block(1)).double()
    for part in range(2):
        for (x,), target in zip(*batch(2, part), strict=True):
            torch.autograd.backward(loss_fn(module(x), target) / 2)
    wanted = {name: parameter.grad for name, parameter in module.named_parameters()}
    for grads in run_distributed(run_in_two_threads, world_size=2):
        torch.testing.assert_close(grads, wanted, rtol=1e-12, atol=1e-12)


def in_mixed_precision() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradients of a schedule and of FSDP's own hooks, microbatch by microbatch."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    modules = []
    for _ in range(2):
        module = nn.Sequential(Block(0), Block(1))
        for inner in (*module, module):
            fully_shard(inner, mesh=mesh, mp_policy=policy)
        modules.append(module)
    schedule = with_fsdp(split_backwards(gpipe(1, num_microbatches=3)), 1)
    stages = [make_stage(schedule, 0, modules[0], "none")]
    runtime = from_schedule(
        schedule, stages, pipelines=[[0], [1]], loss_fn=loss_fn, sharding=FullySharded(stages)
    )
    inputs, targets = batch(3, dist.get_rank())
    runtime.run_microbatches([(x.float(),) for (x,) in inputs], None, targets)
    for index, ((x,), target) in enumerate(zip(inputs, targets, strict=True)):
        modules[1].set_requires_gradient_sync(index == 2)  # type: ignore[operator]
        torch.autograd.backward(loss_fn(modules[1](x.float()), target))
    found = []
    for module in modules:
        grads = {}
        for name, parameter in module.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            assert parameter.grad.dtype == torch.float32
            grads[name] = parameter.grad.full_tensor()
        found.append(grads)
    return found[0], found[1]


def test_mixed_precision_gives_the_gradients_of_fsdps_own_accumulation() -> None:
    for got, wanted in run_distributed(in_mixed_precision, world_size=2):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (1,))
    module: Any = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh)
    plain = gpipe(1, num_microbatches=1)
    halved = split_backwards(plain)
    gathered = add_fsdp_unshard_reshard(plain)
    stages = [make_stage(plain, 0, nn.Sequential(module), "none")]
    sharding = FullySharded(stages)
    messages = []
    replicated = nn.parallel.DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
    with_ddp = [make_stage(plain, 0, replicated, "none")]
    for schedule, refused, given in (
        (halved, stages, None),
        (gathered, stages, sharding),
        (plain, with_ddp, None),
    ):
        with pytest.raises(ValueError) as caught:
            from_schedule(schedule, refused, loss_fn=loss_fn, sharding=given)
        messages.append(str(caught.value))
    with pytest.raises(ValueError) as caught:
        FullySharded([make_stage(plain, 0, nn.Linear(2, 2), "none")])
    messages.append(str(caught.value))
    reduced = add_fsdp_reduce_grad(plain)
    runtime = from_schedule(reduced, stages, loss_fn=loss_fn, sharding=sharding)
    with pytest.raises(RuntimeError) as failed:
        runtime.run_microbatches([(torch.ones(1, WIDTH),)], None, [torch.ones(1, WIDTH)])
    return [*messages, str(failed.value)]


def test_what_would_leave_gradients_unreduced_is_refused() -> None:
    [[alone, gathered, replicated, unsharded, ungathered]] = run_distributed(refusals, world_size=1)
    assert alone.startswith("sharding (None) must be given: fully_shard was applied to stage 0")
    assert gathered.startswith("schedule must have a REDUCE_GRAD step for stage 0")
    assert replicated.startswith("module of stage 0 must not be a DistributedDataParallel")
    assert unsharded == "stages ([0]) must have modules that fully_shard was applied to"
    assert ungathered.startswith("parameters of stage 0 must be gathered before it computes")
