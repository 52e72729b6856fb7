"""q, k, v as DTensors whose heads are sharded over another axis of the mesh."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from hp_context import (
    AsyncContextParallel,
    Attention,
    Causal,
    ContextParallel,
    shard_sequence,
    unshard_sequence,
)
from hp_platform.testing import run_distributed

pytestmark = pytest.mark.usefixtures("one_thread")

SEQ, HEADS, KV_HEADS, SIZE = 12, 8, 4, 4
WIDTH = HEADS * SIZE


class Block(nn.Module):
    """Projections whose outputs may be DTensors, attention with sinks, a projection back."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        kv_width = KV_HEADS * SIZE
        self.q = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        self.k = nn.Linear(WIDTH, kv_width, bias=False, dtype=torch.float64)
        self.v = nn.Linear(WIDTH, kv_width, bias=False, dtype=torch.float64)
        self.core = Attention(Causal(), sinks=torch.linspace(-1, 1, HEADS, dtype=torch.float64))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, SIZE)) for p in (self.q, self.k, self.v))
        y: Tensor = self.out(self.core(q, k, v).flatten(2))
        return x + y


def hidden() -> Tensor:
    return torch.randn(
        2, SEQ, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


def gradients(block: Block, x: Tensor) -> list[Tensor]:
    x = x.requires_grad_()
    out = block(x)
    out.square().sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad]


def tensor_and_context_parallel(degree: int | None, *, overlap: bool) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    block = Block()
    columns = {name: ColwiseParallel(use_local_output=False) for name in "qkv"}
    rows = RowwiseParallel(input_layouts=Shard(-1))
    parallelize_module(block, mesh["tp"], {**columns, "out": rows})
    sinks = block.core.sinks
    assert sinks is not None
    block.core.sinks = nn.Parameter(distribute_tensor(sinks.detach(), mesh["tp"], [Shard(0)]))
    if overlap:
        parallel = AsyncContextParallel(degree, overlap=True)
        parallel.apply(block.core, mesh["cp"], block.q, block.k, block.v)
    else:
        ContextParallel(degree).apply(block.core, mesh["cp"])
    kept: list[Tensor] = []
    block.core.register_forward_hook(lambda _, __, output: kept.append(output))
    mine = gradients(block, shard_sequence(hidden(), mesh["cp"]))
    (output,) = kept
    assert isinstance(output, DTensor)
    assert output.placements == (Shard(2),)
    assert output.shape == (2, SEQ // 2, HEADS, SIZE)
    weights = []
    for parameter in block.parameters():
        assert isinstance(parameter.grad, DTensor)
        weights.append(parameter.grad.full_tensor())
        dist.all_reduce(weights[-1], group=mesh.get_group("cp"))
    return [*(unshard_sequence(x, mesh["cp"]) for x in mine), *weights]


def every_way() -> list[list[Tensor]]:
    ways = [(None, False), (1, False), (None, True)]
    return [tensor_and_context_parallel(degree, overlap=overlap) for degree, overlap in ways]


def test_tensor_parallel_heads_and_a_split_sequence_equal_one_process() -> None:
    block = Block()
    expected = gradients(block, hidden())
    expected += [p.grad for p in block.parameters() if p.grad is not None]
    for ways in run_distributed(every_way, world_size=4, timeout=120):
        for whole in ways:
            assert len(whole) == len(expected) == 7
            for a, b in zip(whole, expected, strict=True):
                assert float((a - b).abs().max() / b.abs().max()) <= 1e-12


def refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def placed(placement: Placement, *, heads: int = 4) -> DTensor:
        local = torch.randn(
            1, 4, heads, 8, generator=torch.Generator().manual_seed(mesh.get_rank())
        )
        return DTensor.from_local(local, mesh, [placement], run_check=False)

    def uneven(mesh: DeviceMesh) -> DTensor:
        return distribute_tensor(torch.randn(1, 4, 3, 8), mesh, [Shard(2)])

    heads = placed(Shard(2))
    attempts: list[Callable[[], tuple[Tensor, ...]]] = [
        lambda: (placed(Shard(1)),) * 3,
        lambda: (placed(Shard(3)),) * 3,
        lambda: (placed(Shard(-1)),) * 3,
        lambda: (placed(Partial()),) * 3,
        lambda: (heads, heads, heads.to_local()),
        lambda: (heads.to_local(), heads, heads),
        lambda: (heads, placed(Replicate()), heads),
        lambda: (uneven(mesh),) * 3,
    ]
    messages = []
    for attempt in attempts:
        core = ContextParallel().apply(Attention(), mesh)
        with pytest.raises((ValueError, TypeError)) as caught:
            core(*attempt())
        messages.append(str(caught.value))
    return messages


def test_placements_that_attention_cannot_keep_apart_are_refused_by_name() -> None:
    expected = [
        "placement of q (S(1) on axis tp) must not shard the sequence (dim 1)",
        "placement of q (S(3) on axis tp) must not shard the head size (dim 3)",
        "placement of q (S(3) on axis tp) must not shard the head size (dim 3)",
        "placement of q (P(sum) on axis tp) must be Shard or Replicate",
        "v (Tensor) must be a DTensor as the others are",
        "q (Tensor) must be a DTensor as the others are",
        "placements of k ((Replicate(),) on DeviceMesh(",
        "size of q (3) at dim 2 must be divisible by the number of its shards (2)",
    ]
    for messages in run_distributed(refusals, world_size=2):
        for message, beginning in zip(messages, expected, strict=True):
            assert message.startswith(beginning), message
