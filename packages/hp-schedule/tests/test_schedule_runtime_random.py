"""Schedules, sizes, values and options drawn at random, each against one process.

All draws of one number of ranks run in one group, one after the other. `HP_RUNTIME_DRAWS` sets how
many there are.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hp_platform import linear
from hp_platform.testing import compare, run_distributed
from hp_schedule import (
    SCHEDULES,
    Costs,
    Schedule,
    add_send_recv,
    search,
)
from hp_schedule.runtime import (
    DeferringSplitter,
    EdgeGroups,
    GraphCuttingSplitter,
    PipelineScheduleRuntime,
    PipelineStage,
    SharedParameterInfo,
    TensorSpec,
    TorchTransport,
    build_edge_groups,
    share_parameters,
)

WIDTH = 4
DRAWS = int(os.environ.get("HP_RUNTIME_DRAWS", "10"))

TRAINING = [kind for kind in SCHEDULES.values() if kind.trains]
PLAIN = [kind for kind in TRAINING if kind.stages_per_rank]
VIRTUAL = [kind for kind in TRAINING if not kind.stages_per_rank]


@dataclass(frozen=True)
class Draw:
    """One pipeline and what it is run with.

    Attributes:
        lengths: Rows of each microbatch; all equal where stages say what they expect.
        told: Whether shapes are told in headers.
        planned: Whether both ends know the shapes of each microbatch.
    """

    schedule: Schedule
    lengths: tuple[int, ...]
    told: bool
    planned: bool
    cuts: bool
    tied: bool
    max_sends: int
    loss_scale: float


def draw(num_ranks: int, seed: int) -> Draw:
    random = Random(1000 * num_ranks + seed)
    num, virtual = random.randint(1, 7), random.randint(1, 3)
    kind = random.randrange(3)
    if kind == 0:
        costs = Costs(
            forward=[random.uniform(0.5, 2) for _ in range(num_ranks * virtual)],
            latency=random.choice((0.0, 0.4)),
        )
        schedule = search(
            costs,
            num_ranks=num_ranks,
            num_microbatches=num,
            virtual=[virtual],
            num_candidates=2,
            seed=seed,
        ).schedule
    else:
        drawn = random.choice(PLAIN if kind == 1 else VIRTUAL)
        schedule = drawn.build(num_ranks, num, virtual, paired=random.random() < 0.5)
    told, planned = random.choice(((True, False), (False, True), (False, False)))
    lengths = tuple(random.randint(1, 4) if told or planned else 3 for _ in range(num))
    return Draw(
        schedule if schedule.has_communication else add_send_recv(schedule),
        lengths,
        told,
        planned,
        cuts=random.random() < 0.5,
        tied=random.random() < 0.5 and schedule.num_stages > 1,
        max_sends=random.choice((0, 1, 8)),
        loss_scale=random.choice((1.0, 0.125)),
    )


class Stage(nn.Module):
    """Passes on a value, a mask, a table without gradient and a value that skips stages."""

    def __init__(self, index: int, *, is_last: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(index)
        self.index, self.is_last = index, is_last
        # Those of a tied parameter start as different values, of which the first counts.
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator).double() / 2)
        self.inner = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator).double() / 2)
        self.scale = nn.Parameter(torch.rand(WIDTH, generator=generator).double())
        self.bias = nn.Parameter(torch.rand(WIDTH, generator=generator).double())

    def forward(self, x: Tensor, *others: Tensor, shift: float) -> Any:
        keep, table, skip = others or (x[:, 0] > 0, torch.ones_like(x).cumsum(0), x)
        h = torch.tanh(linear(x, self.weight)) @ self.inner + x @ self.weight
        y = torch.where(keep[:, None], h * self.scale, x) + table * shift + self.bias
        if self.is_last:
            return y + skip * self.scale
        # The skipped value goes on as it came, or twice, as a view of what it was made from.
        return y, keep.roll(1), table + 1, skip if self.index % 2 else y.t().t()


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def modules_of(case: Draw) -> list[Stage]:
    last = case.schedule.num_stages - 1
    return [Stage(index, is_last=index == last) for index in range(last + 1)]


def batch_of(case: Draw) -> tuple[list[tuple[Tensor]], list[dict[str, Any]], list[Tensor]]:
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randn(n, WIDTH, generator=generator).double() for n in case.lengths]
    return (
        [(x,) for x in inputs],
        [{"shift": 0.1 * number} for number in range(len(inputs))],
        [x.roll(1) for x in inputs],
    )


def run_draw(case: Draw, groups: EdgeGroups) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Run twice, with an evaluation between; return losses and accumulated gradients."""
    schedule, rank = case.schedule, dist.get_rank()
    ranks = list(range(schedule.num_ranks))
    lengths = [*case.lengths]

    def specs_of(microbatch: int) -> list[TensorSpec]:
        shape = (lengths[microbatch], WIDTH)
        return [
            TensorSpec(shape, torch.float64),
            TensorSpec(shape[:1], torch.bool),
            TensorSpec(shape, torch.float64, requires_grad=False),
            TensorSpec(shape, torch.float64),
        ]

    specs = specs_of if case.planned else specs_of(0)
    modules = modules_of(case)
    stages = [
        PipelineStage(
            modules[index],
            stage_index=index,
            num_stages=schedule.num_stages,
            device=torch.device("cpu"),
            input_spec=None if case.told or index == 0 else specs,
            output_spec=specs_of if case.planned else None,
            splitter=GraphCuttingSplitter() if case.cuts else DeferringSplitter(),
        )
        for index in schedule.stages_of(rank)
    ]
    shared = None
    if case.tied:
        info = SharedParameterInfo({0: "weight", schedule.num_stages - 1: "weight"})
        shared = share_parameters([info], stages, schedule=schedule, pipelines=[ranks])
    runtime = PipelineScheduleRuntime(
        stages,
        schedule,
        pipeline_rank=rank,
        transport=TorchTransport(
            schedule, rank_of=ranks, groups=groups, max_sends_in_flight=case.max_sends
        ),
        loss_fn=loss_fn,
        loss_scale=case.loss_scale,
        shared_parameters=shared,
    )
    args, kwargs, targets = batch_of(case)
    first = runtime.run_microbatches(args, kwargs, targets).losses
    evaluated = runtime.evaluate_microbatches(args, kwargs, targets).losses
    lengths.reverse()  # shapes may be others in each run
    second = runtime.run_microbatches(args[::-1], kwargs, targets[::-1]).losses
    return [*first, *evaluated, *second], gradients(
        {stage.stage_index: stage.module for stage in stages}
    )


def run_draws(cases: Sequence[Draw]) -> list[tuple[list[Tensor], dict[str, Tensor]]]:
    num = dist.get_world_size()
    every = [(a, b) for a in range(num) for b in range(num) if a != b]
    groups = build_edge_groups([range(num)], edges=every)
    return [run_draw(case, groups) for case in cases]


def gradients(modules: dict[int, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{stage}.{name}": parameter.grad
        for stage, module in modules.items()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def one_process(case: Draw) -> tuple[list[Tensor], dict[str, Tensor]]:
    modules = modules_of(case)
    if case.tied:
        modules[-1].weight = modules[0].weight
    args, kwargs, targets = batch_of(case)

    def epoch(order: int) -> list[Tensor]:
        losses = []
        for x, options, target in zip(args[::order], kwargs, targets[::order], strict=True):
            values: Any = x
            for module in modules:
                values = module(*values, **options)
            losses.append(loss_fn(values, target))
            torch.autograd.backward(losses[-1] * case.loss_scale)
        return [loss.detach() for loss in losses]

    first, second = epoch(1), epoch(-1)
    return [*first, *first, *second], gradients(dict(enumerate(modules)))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_whatever_is_drawn_computes_what_one_process_computes(num_ranks: int) -> None:
    cases = [draw(num_ranks, seed) for seed in range(DRAWS)]
    found = run_distributed(run_draws, cases, world_size=num_ranks, timeout=30 + 5 * DRAWS)
    for number, case in enumerate(cases):
        losses, grads = one_process(case)
        by_rank = [results[number] for results in found]
        merged: dict[str, Tensor] = {}
        for _, part in by_rank:
            merged |= part
        actual = {f"loss {n}": x for n, x in enumerate(x for part, _ in by_rank for x in part)}
        expected = {f"loss {n}": x for n, x in enumerate(losses)}
        result = compare(actual | merged, expected | grads, bound=1e-12)
        assert result.ok, f"{case}\n{result}"
