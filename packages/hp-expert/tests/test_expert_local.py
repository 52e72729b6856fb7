"""Experts that are all here: what the host reads, and what it does not."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from hp_expert import GroupedExperts, LocalDispatcher, batch
from hp_expert.experts import swiglu
from hp_expert.experts.grouped import Grouped
from hp_expert.testing import host_reads

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS, DIM, HIDDEN, EXPERTS, TOP_K = 24, 16, 32, 8, 2


def layer(x: Tensor, experts: Tensor, weights: Tensor, module: GroupedExperts) -> Tensor:
    dispatcher = LocalDispatcher(EXPERTS)
    rows, state = dispatcher.launch_dispatch(*dispatcher.prepare(x, experts, weights))
    out = module(dispatcher.finish_dispatch(rows, state))
    return dispatcher.finish_combine(dispatcher.launch_combine(out, state), state)


def run(experts: Tensor) -> tuple[list[str], list[Tensor]]:
    """Reads of the host, and output and gradients of the layer with grouped products."""
    torch.manual_seed(0)
    module = GroupedExperts(EXPERTS, DIM, HIDDEN).to(torch.bfloat16)
    x = torch.randn(TOKENS, DIM).to(torch.bfloat16).requires_grad_()
    weights = torch.rand(TOKENS, TOP_K, requires_grad=True)
    with patch.object(swiglu, "_fastest", lambda *_: Grouped()), host_reads() as reads:
        y = layer(x, experts, weights, module)
        y.backward(torch.ones_like(y))
    leaves: list[Tensor] = [x, weights, *module.parameters()]
    return reads, [y.detach(), *[leaf.grad for leaf in leaves if leaf.grad is not None]]


@pytest.mark.parametrize("dropped", [False, True])
def test_counts_on_the_device_are_the_same_numbers_bit_for_bit(dropped: bool) -> None:
    torch.manual_seed(1)
    experts = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
    if dropped:
        experts[3], experts[7, 1] = -1, -1
    reads, expected = run(experts)
    assert reads == ["tolist"]
    with patch.object(batch, "stays_on_device", lambda _rows: True):
        reads, actual = run(experts)
    assert reads == []
    assert len(actual) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("wrong", [EXPERTS, EXPERTS + 1, 1 << 40, -2, -(1 << 40)])
def test_an_expert_that_does_not_exist_is_no_silent_zero(wrong: int) -> None:
    experts = torch.zeros(TOKENS, TOP_K, dtype=torch.int64)
    experts[5, 1] = wrong
    with pytest.raises(ValueError, match=r"-1 for none, but 1 are not"):
        run(experts)
    with (
        patch.object(batch, "stays_on_device", lambda _rows: True),
        pytest.raises(RuntimeError, match=r"experts must be in \[0, num_experts \(8\)\)"),
    ):
        run(experts)
