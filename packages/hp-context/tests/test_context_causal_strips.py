"""Values with a head size of their own, attended to in strips of queries."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hp_context import Causal, Full, masked_attention


def heads(seq_len: int, width: int) -> Tensor:
    """Return [B, H, S, width] as projections leave it: heads within positions."""
    x = torch.randn(2, seq_len, 3, width, dtype=torch.float64)
    return x.requires_grad_().transpose(1, 2)


@pytest.mark.parametrize("seq_len", [1, 63, 64, 65, 257, 1030])
def test_output_and_gradients_are_those_of_torch(seq_len: int) -> None:
    torch.manual_seed(0)
    q, k, v = heads(seq_len, 12), heads(seq_len, 12), heads(seq_len, 5)
    grad = torch.randn(2, 3, seq_len, 5, dtype=torch.float64)
    results = []
    for ours in (True, False):
        if ours:
            y = masked_attention(q, k, v, mask=Causal(), seq_dim=2, head_dim=1, scale=0.3)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
        results.append((y, *torch.autograd.grad(y, (q, k, v), grad)))
    for mine, torchs in zip(*results, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-12, atol=1e-13)


def test_a_head_has_the_same_bits_alone_and_keeps_less_for_backward() -> None:
    torch.manual_seed(0)
    q, k, v = heads(200, 12), heads(200, 12), heads(200, 5)
    kept: list[int] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x.untyped_storage().nbytes())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = masked_attention(q, k, v, mask=Causal(), seq_dim=2, head_dim=1)
    alone = masked_attention(*(x[:, 1:2] for x in (q, k, v)), mask=Causal(), seq_dim=2, head_dim=1)
    assert torch.equal(y[:, 1:2], alone)
    scores = 2 * 3 * 200 * 200 * y.element_size()
    assert sum(kept) < 0.7 * scores + 4 * q.numel() * y.element_size()
    other = masked_attention(q, k, v, mask=Full(), seq_dim=2, head_dim=1)
    assert not torch.allclose(other, y)
