"""An attention module that the package has never seen, with its sequence on several ranks.

One matrix makes q, k and v; rotary embeddings follow; the core is the module's own call of torch's
attention. Only the core becomes context parallel. Compares output and gradients with one process.

    pip install hp-context
    torchrun --nproc-per-node 4 own_attention.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hp_context import (
    Causal,
    ContextParallel,
    HeadTail,
    local_positions,
    mask_tensor,
    shard_sequence,
    unshard_sequence,
)

BATCH, SEQ, HEADS, GROUPS, SIZE = 2, 32, 8, 2, 8
WIDTH = HEADS * SIZE


class Core(nn.Module):
    """Scaled attention under the mask that it is given; [B, S, heads, D]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Attend."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
        return out.transpose(1, 2)


class FusedAttention(nn.Module):
    """Attention of somebody's model."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, WIDTH + 2 * GROUPS * SIZE, bias=False)
        self.core = Core()
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, positions: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Attend: x [B, s, width], positions [s] of the whole sequence."""
        sizes = [WIDTH, GROUPS * SIZE, GROUPS * SIZE]
        q, k, v = (part.unflatten(-1, (-1, SIZE)) for part in self.qkv(x).split(sizes, -1))
        q, k = (rotate(part, positions) for part in (q, k))
        return self.out(self.core(q, k, v, allowed).flatten(2))


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embeddings of x [B, s, heads, D]."""
    angle = positions[:, None, None] / 100 ** torch.linspace(0, 1, SIZE // 2, dtype=torch.float64)
    one, other = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([one * cos - other * sin, one * sin + other * cos], -1)


def build() -> FusedAttention:
    """The same weights everywhere."""
    torch.manual_seed(0)
    return FusedAttention().double()


def whole() -> tuple[Tensor, Tensor]:
    """Input and gradient of the output, [B, S, width]."""
    x, grad = torch.randn(2, BATCH, SEQ, WIDTH, dtype=torch.float64)
    return x, grad


def alone() -> list[Tensor]:
    """Output and gradients of one process."""
    model = build()
    x, grad = whole()
    out = model(x, torch.arange(SEQ), mask_tensor(Causal(), SEQ))
    out.backward(grad)
    return [out.detach(), *(parameter.grad for parameter in model.parameters())]


def on_parts(degree: int | None) -> list[Tensor]:
    """The same on parts of the sequence."""
    group, layout = dist.group.WORLD, HeadTail()
    model = build()
    parallel = ContextParallel(degree, mask=Causal(), mask_kwarg_name="allowed", layout=layout)
    parallel.apply(model.core, group)
    x, grad = (shard_sequence(part, group, layout=layout) for part in whole())
    out = model(x, local_positions(SEQ, group, layout=layout))
    out.backward(grad)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    gradients = [parameter.grad for parameter in model.parameters()]
    return [unshard_sequence(out.detach(), group, layout=layout), *gradients]


def main() -> dict[str, float]:
    """Compare the modes; return the largest error of each."""
    torch.set_num_threads(1)
    expected, found = alone(), {}
    for mode, degree in {"Ulysses": None, "all-gather K/V": 1, "hybrid": 2}.items():
        pairs = zip(on_parts(degree), expected, strict=True)
        found[mode] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    if dist.get_rank() == 0:
        for mode, worst in found.items():
            print(f"{mode}: output and gradients differ from one process by {worst:.1e}")
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
