"""Mixture-of-experts layers and context parallelism inside the stages of unequal pipelines."""

from __future__ import annotations

from collections.abc import Sequence
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
from hp_schedule import add_send_recv, one_f_one_b, u_shape
from hp_schedule.runtime import PipelineScheduleRuntime, PipelineStage
from hp_vtp import PipelineLayout, Placement, Replicated, Sharded, StageLayout
from hp_vtp.pipeline import StageTransport, pipeline_rank
from hp_vtp.transport import TensorMeta, Transport

# B batch, S sequence, D width, N heads, E experts of width F; a stage may have 1, 2, 3 or 4 ranks
B, S, D, N, E, F = 2, 12, 8, 4, 12, 12
MICROBATCHES = 3
SIZES = ([1, 2, 3], [2, 3, 1], [1, 2, 2], [2, 4], [3, 1, 2])


class Layer(nn.Module):
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


def build(num_layers: int) -> list[Layer]:
    torch.manual_seed(0)
    return [Layer().double() for _ in range(num_layers)]


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(B, S, D, generator=generator, dtype=torch.float64) for _ in range(MICROBATCHES)
    ]


def share_of_loss(y: Tensor, target: Tensor) -> Tensor:
    """Of these positions in the mean over all of them."""
    return (y - target).square().sum() / (B * S * D)


def reference(num_layers: int) -> list[dict[str, Tensor]]:
    """Gradients of each layer in one process."""
    model = build(num_layers)
    for x in inputs():
        y = x
        for layer in model:
            y = layer(y)
        (share_of_loss(y, x) / MICROBATCHES).backward()
    return [
        {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
        for layer in model
    ]


def spread(layer: Layer, group: ProcessGroup, *, is_sharded: bool) -> None:
    """Cut the experts: by number where tokens are spread, by width where every rank has all."""
    style: Any = ExpertParallel() if is_sharded else TensorParallel()
    style.apply(layer.moe, group)
    if is_sharded:
        ContextParallel().apply(layer.core, group)


def error_of(layer: Layer, wanted: dict[str, Tensor], group: ProcessGroup) -> float:
    """Return the largest relative error of a gradient."""
    worst = 0.0
    for name, parameter in layer.named_parameters():
        grad, whole = parameter.grad, wanted[name]
        assert grad is not None
        if grad.shape != whole.shape:
            (dim,) = (i for i in range(grad.ndim) if grad.shape[i] != whole.shape[i])
            whole = whole.chunk(group.size(), dim)[group.rank()]
        worst = max(worst, ((grad - whole).abs().max() / whole.abs().max()).item())
    return worst


def train(layout: PipelineLayout, group: ProcessGroup) -> float:
    """Return the largest relative error of a gradient of this rank."""
    is_sharded = isinstance(layout.stages[0].boundary, Sharded)
    is_u_shape = layout.chain[0] == layout.chain[-1]
    order = u_shape if is_u_shape else one_f_one_b
    schedule = add_send_recv(order(len(layout.stages), num_microbatches=MICROBATCHES))
    layers = build(layout.num_stages)
    metas = {stage: [TensorMeta((B, S, D), torch.float64)] for stage in range(1, layout.num_stages)}
    mine = [x.chunk(group.size(), 1)[group.rank()] if is_sharded else x for x in inputs()]
    with Transport(layout, timeout=timedelta(seconds=40)) as transport:
        here = layout.logical_stages_of(transport.rank)
        messages = StageTransport(transport, schedule, metas=metas)
        stages = []
        for stage in here:
            spread(layers[stage], group, is_sharded=is_sharded)
            stages.append(
                PipelineStage(
                    layers[stage],
                    stage_index=stage,
                    num_stages=layout.num_stages,
                    device=torch.device("cpu"),
                    input_spec=messages.input_spec(stage) if stage else None,
                )
            )
        runtime = PipelineScheduleRuntime(
            stages,
            schedule,
            pipeline_rank=pipeline_rank(layout, transport.rank),
            transport=messages,
            loss_fn=share_of_loss,
            loss_scale=1 / MICROBATCHES,
        )
        runtime.run_microbatches([[x] for x in mine], targets=mine)
    if is_sharded:  # each rank has seen its own tokens alone
        for stage in here:
            layer = layers[stage]
            for parameter in (layer.qkv.weight, *layer.moe.router.parameters()):
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad, group=group)
    wanted = reference(layout.num_stages)
    return max(error_of(layers[stage], wanted[stage], group) for stage in here)


def errors(sizes: Sequence[int]) -> dict[str, float]:
    """Straight and U-shaped, with all positions on every rank of a stage and with parts of them."""
    found = {}
    for shape in (PipelineLayout.straight, PipelineLayout.u_shaped):
        plain = shape(sizes)
        group = new_group([list(stage.replicas[0]) for stage in plain.stages], name="stage")
        assert group is not None
        for boundary in (Sharded(1), Replicated()):
            placement: Placement = boundary
            stages = tuple(StageLayout(stage.replicas, placement) for stage in plain.stages)
            layout = PipelineLayout(stages, plain.chain)
            found[f"{shape.__name__} {boundary}"] = train(layout, group)
    return found


@pytest.mark.sample("[3, 1, 2]")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_experts_and_context_parallelism_work_inside_stages(sizes: Sequence[int]) -> None:
    for found in run_distributed(errors, sizes, world_size=sum(sizes), timeout=150):
        assert len(found) == 4
        assert max(found.values()) <= 1e-12, found
