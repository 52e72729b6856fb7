"""Bytes that leave a rank in a layer's forward and backward, counted in real exchanges."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hp_expert import AllToAllDispatcher, dispatch_bytes, expected_rows_per_token
from hp_platform.testing import run_distributed, watch_operators

TOKENS, DIM = 512, 1024  # bf16 rows of 2 KiB, which small models have


class Wire:
    """Adds up what exchanges send to other ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.sent = group, 0
        self.exchanges: list[tuple[torch.dtype, int]] = []

    def see(self, name: str, args: Any, kwargs: Any) -> None:
        del kwargs
        if name == "_c10d_functional::all_to_all_single":
            self._count(args[0], args[2])
        elif name in ("c10d::alltoall_base_", "c10d::all_to_all_single_"):
            self._count(args[1], args[4])
        elif name.startswith(("c10d", "_c10d")) and "wait" not in name:
            raise AssertionError(f"{name} is not counted")

    def _count(self, x: Tensor, splits: list[int]) -> None:
        row = x[:1].numel() if x.shape[0] else 0
        mine = splits[self.group.rank()] if splits else x.shape[0] // self.group.size()
        num_bytes = (x.shape[0] - mine) * row * x.element_size()
        self.sent += num_bytes
        self.exchanges.append((x.dtype, num_bytes))


def bytes_sent(num_experts: int, top_k: int, deduplicate: Any) -> tuple[int, list[Any]]:
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator().manual_seed(group.rank())
    experts = torch.rand(TOKENS, num_experts, generator=generator).argsort(-1)[:, :top_k]
    x = torch.randn(TOKENS, DIM, generator=generator).bfloat16().requires_grad_()
    weights = torch.rand(TOKENS, top_k, generator=generator).requires_grad_()
    dispatcher = AllToAllDispatcher(group, num_experts, deduplicate)
    wire = Wire(group)
    with watch_operators(wire.see):
        rows, state = dispatcher.launch_dispatch(*dispatcher.prepare(x, experts, weights))
        batch = dispatcher.finish_dispatch(rows, state)
        assert batch.weights is not None
        out = batch.rows * batch.weights.sum(1, keepdim=True).bfloat16()
        y = dispatcher.finish_combine(dispatcher.launch_combine(out, state), state)
        y.sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    return wire.sent, wire.exchanges


@pytest.mark.parametrize(("world_size", "num_experts", "top_k"), [(2, 16, 4), (4, 64, 8)])
def test_deduplicated_rows_need_at_most_half_of_the_bytes(
    world_size: int, num_experts: int, top_k: int
) -> None:
    plain = run_distributed(bytes_sent, num_experts, top_k, False, world_size=world_size)
    shared = run_distributed(bytes_sent, num_experts, top_k, "auto", world_size=world_size)
    ratio = sum(sent for sent, _ in shared) / sum(sent for sent, _ in plain)
    assert ratio <= 0.5
    # The formula speaks of all rows, also those that stay; the same share of both stays.
    cost = dispatch_bytes(num_experts, top_k, world_size, row_bytes=2 * DIM)
    assert ratio == pytest.approx(cost.deduplicated / cost.plain, rel=0.02)
    per_token = sum(sent for sent, _ in plain) / (TOKENS * world_size)
    crossing = 1 - 1 / world_size
    assert per_token == pytest.approx(cost.plain * crossing, rel=0.05)


def test_every_exchange_is_counted() -> None:
    """Counts, codes, weights, rows and outputs; then their gradients, which codes have none of."""
    (sent, exchanges), _ = run_distributed(bytes_sent, 16, 4, True, world_size=2)
    dtypes = [dtype for dtype, _ in exchanges]
    assert dtypes[:5] == [
        torch.int64, torch.uint8, torch.float32, torch.bfloat16, torch.bfloat16
    ]  # fmt: skip
    assert sorted(map(str, dtypes[5:])) == ["torch.bfloat16", "torch.bfloat16", "torch.float32"]
    by_dtype = dict(exchanges[:4])
    assert by_dtype[torch.float32] == 4 * by_dtype[torch.uint8]
    num_slots = by_dtype[torch.uint8]
    num_rows = by_dtype[torch.bfloat16] // (2 * DIM)
    assert num_rows <= TOKENS < num_slots <= 4 * num_rows
    assert sent == sum(num_bytes for _, num_bytes in exchanges)
    assert num_rows == pytest.approx(TOKENS * expected_rows_per_token(16, 4, 2) / 2, rel=0.05)
    assert by_dtype[torch.int64] == 512 * 8
