"""Mixture-of-experts layers and context parallelism inside a stage of an unequal pipeline."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hp_context import Attention, Causal, ContextParallel
from hp_expert import ExpertParallel, GroupedExperts, MoE, TensorParallel, TopKRouter
from hp_platform import new_group
from hp_platform.testing import run_distributed
from hp_schedule import add_send_recv, u_shape
from hp_schedule.runtime import PipelineScheduleRuntime, PipelineStage
from hp_vtp import PipelineLayout, Placement, Replicated, Sharded, StageLayout
from hp_vtp.pipeline import StageTransport, pipeline_rank
from hp_vtp.transport import TensorMeta, Transport

# B batch, S sequence, D width, N heads, E experts of width F
B, S, D, N, E, F = 2, 8, 8, 2, 4, 6
MICROBATCHES = 3


class Middle(nn.Module):
    """Attention over the sequence, then experts."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.core: nn.Module = Attention(Causal())
        self.moe = MoE(TopKRouter(D, num_experts=E, top_k=2), GroupedExperts(E, D, F))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, N, D // N)).unbind(2)
        x = x + self.core(*qkv).flatten(2)
        y: Tensor = x + self.moe(x)[0]
        return y


def build() -> tuple[nn.Module, Middle, nn.Module]:
    torch.manual_seed(0)
    return nn.Linear(D, D).double(), Middle().double(), nn.Linear(D, D).double()


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(B, S, D, generator=generator, dtype=torch.float64) for _ in range(MICROBATCHES)
    ]


def mean_square(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def reference() -> dict[str, Tensor]:
    model = build()
    for x in inputs():
        y = x
        for module in model:
            y = module(y)
        (mean_square(y, x) / MICROBATCHES).backward()
    return {
        f"{stage}.{name}": parameter.grad
        for stage, module in enumerate(model)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def spread(middle: Middle, group: ProcessGroup, *, is_sharded: bool) -> None:
    """Cut the experts: by number where tokens are spread, by width where every rank has all."""
    style: Any = ExpertParallel() if is_sharded else TensorParallel()
    style.apply(middle.moe, group)
    if is_sharded:
        middle.core = ContextParallel().apply(Attention(Causal()), group)


def train(boundary: Placement) -> float:
    """Return the largest relative error of a gradient of this rank."""
    layout = PipelineLayout(
        (StageLayout(((0,),)), StageLayout(((1, 2),), boundary)), chain=(0, 1, 0)
    )
    is_sharded = isinstance(boundary, Sharded)
    group = new_group([[1, 2]], name="stage 1")
    modules: dict[int, nn.Module] = dict(enumerate(build()))
    schedule = add_send_recv(u_shape(2, num_microbatches=MICROBATCHES))
    metas = {stage: [TensorMeta((B, S, D), torch.float64)] for stage in (1, 2)}
    with Transport(layout, timeout=timedelta(seconds=40)) as transport:
        here = layout.logical_stages_of(transport.rank)
        middle = modules[1]
        if group is not None:
            assert isinstance(middle, Middle)
            spread(middle, group, is_sharded=is_sharded)
        messages = StageTransport(transport, schedule, metas=metas)
        runtime = PipelineScheduleRuntime(
            [
                PipelineStage(
                    modules[stage],
                    stage_index=stage,
                    num_stages=3,
                    device=torch.device("cpu"),
                    input_spec=messages.input_spec(stage) if stage else None,
                )
                for stage in here
            ],
            schedule,
            pipeline_rank=pipeline_rank(layout, transport.rank),
            transport=messages,
            loss_fn=mean_square,
            loss_scale=1 / MICROBATCHES,
        )
        runtime.run_microbatches([[x] for x in inputs()], targets=inputs())
    worst = 0.0
    expected = reference()
    for stage in here:
        for name, parameter in modules[stage].named_parameters():
            grad, wanted = parameter.grad, expected[f"{stage}.{name}"]
            assert grad is not None
            if grad.shape == wanted.shape and stage == 1 and is_sharded:
                dist.all_reduce(grad, group=group)  # a copy: each rank has seen its tokens alone
            if grad.shape != wanted.shape:
                (dim,) = (i for i in range(grad.ndim) if grad.shape[i] != wanted.shape[i])
                wanted = wanted.chunk(2, dim)[transport.rank - 1]
            worst = max(worst, ((grad - wanted).abs().max() / wanted.abs().max()).item())
    return worst


@pytest.mark.parametrize("boundary", [Sharded(1), Replicated()], ids=str)
def test_experts_and_context_parallelism_work_inside_a_stage(boundary: Placement) -> None:
    assert max(run_distributed(train, boundary, world_size=3, timeout=120)) <= 1e-12
