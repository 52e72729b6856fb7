"""FSDP2 under a schedule: data parallel 2 x pipeline 2 against one process."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hp_platform.testing import run_distributed
from hp_schedule import (
    MetaStep,
    MetaStepType,
    Schedule,
    add_fsdp_reduce_grad,
    add_fsdp_unshard_reshard,
    interleaved_1f1b,
    one_f_one_b,
)
from hp_schedule.runtime import (
    FullySharded,
    GraphCuttingSplitter,
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
        pipelines=[[0, 1], [2, 3]],
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
}
CASES = [
    ("1f1b", "none", 3, True),
    ("interleaved", "none", 1, True),
    ("split", "defer", 2, True),
    ("split", "cut", 1, True),
    ("overlap", "defer", 1, False),
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
