"""A model of tensor-parallel blocks over the stages of any layout, and the same in one process.

B batch, S sequence, H hidden, F features of a block, V vocabulary, k ranks of a stage. A block is
x + tanh(x @ up.T) @ down.T, with `up` cut along its rows and `down` along its columns. Under
sequence parallelism a rank holds a slice of S between blocks.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hp_platform import all_gather_uneven, new_group, reduce_scatter_uneven
from hp_vtp import PipelineLayout, Replicated, Sharded, StageLayout
from hp_vtp.topology.stages import cut

B, S, H, F, V = 2, 7, 6, 11, 13


class _Copy(torch.autograd.Function):
    """Identity whose backward sums over the ranks of the stage."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    """Sum over the ranks of the stage whose backward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        del ctx
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        del ctx
        return grad, None


copy_to: Any = _Copy.apply
sum_over: Any = _Sum.apply


class Block(nn.Module):
    """One block, or this rank's part of it."""

    def __init__(
        self,
        layer: int,
        *,
        rank: int = 0,
        ranks: int = 1,
        group: ProcessGroup | None = None,
        sequence: bool = False,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(100 + layer)
        up = torch.randn(F, H, generator=generator, dtype=torch.float64) / H**0.5
        down = torch.randn(H, F, generator=generator, dtype=torch.float64) / F**0.5
        first, last = cut(F, ranks)[rank : rank + 2]
        self.up = nn.Parameter(up[first:last].clone())
        self.down = nn.Parameter(down[:, first:last].clone())
        self.group = group
        ends = cut(S, ranks)
        self.sizes = [b - a for a, b in pairwise(ends)] if sequence else None

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return x + torch.tanh(x @ self.up.t()) @ self.down.t()
        if self.sizes is None:
            whole: Tensor = copy_to(x, self.group)
            total: Tensor = sum_over(torch.tanh(whole @ self.up.t()) @ self.down.t(), self.group)
            return x + total
        whole = all_gather_uneven(x, sizes=self.sizes, dim=1, group=self.group)
        y = torch.tanh(whole @ self.up.t()) @ self.down.t()
        return x + reduce_scatter_uneven(y, sizes=self.sizes, dim=1, group=self.group)


class First(nn.Module):
    """The first stage: tokens [B, S] to activations, under sequence parallelism to a slice."""

    def __init__(self, block: Block, *, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Parameter(embedding())
        self.block = block
        self.rank, self.ranks = rank, ranks

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding[tokens]
        if self.block.sizes is not None:
            first, last = cut(S, self.ranks)[self.rank : self.rank + 2]
            x = x[:, first:last]
        y: Tensor = self.block(x)
        return y


class Last(nn.Module):
    """The last stage: a block, then logits [B, S, V]; under sequence parallelism of the slice."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.embedding = nn.Parameter(embedding())
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        return y @ self.embedding.t()


def embedding() -> Tensor:
    generator = torch.Generator().manual_seed(99)
    return torch.randn(V, H, generator=generator, dtype=torch.float64)


def batch(num: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(7)
    tokens = [torch.randint(V, (B, S), generator=generator) for _ in range(num)]
    targets = [torch.randint(V, (B, S), generator=generator) for _ in range(num)]
    return tokens, targets


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """Sum over this rank's positions, divided by the number of all positions."""
    loss = nn.functional.cross_entropy(logits.reshape(-1, V), target.reshape(-1), reduction="sum")
    return loss / (B * S)


def reference(num_stages: int, num: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and gradients of their mean by name, of one process; the embedding is tied."""
    blocks = [Block(layer) for layer in range(num_stages)]
    first, last = First(blocks[0]), Last(blocks[-1])
    last.embedding = first.embedding
    losses = []
    for tokens, target in zip(*batch(num), strict=True):
        x = first(tokens)
        for block in blocks[1:-1]:
            x = block(x)
        loss = loss_of(last(x), target)
        (loss / num).backward()
        losses.append(loss.item())
    grads = {"embedding": first.embedding.grad}
    for layer, block in enumerate(blocks):
        grads |= {f"{layer}.up": block.up.grad, f"{layer}.down": block.down.grad}
    return losses, {name: grad for name, grad in grads.items() if grad is not None}


def layout_of(
    sizes: Sequence[int], *, u_shape: bool, sequence: bool, dp: Sequence[int] | int = 1
) -> PipelineLayout:
    build = PipelineLayout.u_shaped if u_shape else PipelineLayout.straight
    layout = build(sizes, dp=dp)
    boundary = Sharded(1) if sequence else Replicated()
    stages = tuple(StageLayout(stage.replicas, boundary) for stage in layout.stages)
    return PipelineLayout(stages, layout.chain)


def tp_group(layout: PipelineLayout) -> ProcessGroup:
    lists = [sorted(part) for stage in layout.stages for part in stage.replicas]
    group = new_group(lists, name="tp")
    assert group is not None
    return group


def modules_of(layout: PipelineLayout, group: ProcessGroup) -> dict[int, nn.Module]:
    """This rank's modules by logical stage; in a U-shape first and last share the embedding."""
    me = dist.get_rank()
    rank, ranks = layout.tp_rank_of(me), layout.tp_sizes[layout.stage_of(me)]
    sequence = isinstance(layout.stages[0].boundary, Sharded)
    made: dict[int, nn.Module] = {}
    for stage in layout.logical_stages_of(me):
        block = Block(stage, rank=rank, ranks=ranks, group=group, sequence=sequence)
        if stage == 0:
            made[stage] = First(block, rank=rank, ranks=ranks)
        elif stage == layout.num_stages - 1:
            made[stage] = Last(block)
        else:
            made[stage] = block
    first, last = made.get(0), made.get(layout.num_stages - 1)
    if isinstance(first, First) and isinstance(last, Last):
        last.embedding = first.embedding
    return made


def gradients_of(layout: PipelineLayout, modules: dict[int, nn.Module]) -> dict[str, Tensor]:
    """Gradients of this rank's parameters by name. Sums those of the embedding under SP."""
    found: dict[str, Tensor] = {}
    for stage, module in modules.items():
        block = module if isinstance(module, Block) else module.block
        assert isinstance(block, Block)
        for name, parameter in block.named_parameters():
            assert parameter.grad is not None
            found[f"{stage}.{name}"] = parameter.grad
        if isinstance(module, (First, Last)):
            assert module.embedding.grad is not None
            found[f"embedding.{stage}"] = module.embedding.grad
    del layout
    return found


def check_gradients(
    layout: PipelineLayout,
    modules: dict[int, nn.Module],
    group: ProcessGroup,
    expected: dict[str, Tensor],
) -> float:
    """The largest error relative to the largest value of a gradient, over this rank's parts."""
    me = dist.get_rank()
    rank, ranks = layout.tp_rank_of(me), layout.tp_sizes[layout.stage_of(me)]
    first, last = cut(F, ranks)[rank : rank + 2]
    found = gradients_of(layout, modules)
    worst = 0.0
    if isinstance(layout.stages[0].boundary, Sharded):
        for name in sorted(name for name in found if name.startswith("embedding")):
            found[name] = found[name].clone()
            dist.all_reduce(found[name], group=group)
    is_u_shape = layout.chain[0] == layout.chain[-1]
    for name, grad in found.items():
        if name.startswith("embedding"):
            if not is_u_shape:
                continue  # each end has a copy with its own part of the gradient
            wanted = expected["embedding"]
        else:
            whole = expected[name]
            wanted = whole[first:last] if name.endswith("up") else whole[:, first:last]
        assert grad.shape == wanted.shape
        worst = max(worst, ((grad - wanted).abs().max() / wanted.abs().max()).item())
    return worst
