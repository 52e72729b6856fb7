"""Experts of one's own, which compute on an `ExpertBatch` and end in its `sum_over_slots`."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hp_expert import AllToAllDispatcher, GroupedExperts, LocalDispatcher
from hp_expert.batch import ExpertBatch
from hp_platform.testing import run_in_threads

pytestmark = pytest.mark.usefixtures("one_thread")

DIM, HIDDEN = 8, 12


def leaves(num_experts: int) -> list[Tensor]:
    """Tokens, routing weights and two matrices for each expert, in fp64."""
    torch.manual_seed(0)
    shapes = [(10, DIM), (10, 4), (num_experts, HIDDEN, DIM), (num_experts, DIM, HIDDEN)]
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def chosen(num_experts: int, top_k: int) -> Tensor:
    """Different experts for each token; the first token has one choice less."""
    experts = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(10)])
    experts[0, -1] = -1
    return experts


def gelu_experts(batch: ExpertBatch, up: Tensor, down: Tensor) -> Tensor:
    """Apply experts that have no gate."""
    x, y = batch.rows[batch.row_at()], []
    for index, positions in enumerate(batch.spans()):
        y.append(F.gelu(x[positions] @ up[index].T) @ down[index].T)
    return batch.sum_over_slots(torch.cat(y), batch.weights)


def plain(x: Tensor, weights: Tensor, up: Tensor, down: Tensor, experts: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for token, choices in enumerate(experts.tolist()):
        for choice, expert in enumerate(choices):
            if expert >= 0:
                one = F.gelu(x[token] @ up[expert].T) @ down[expert].T
                y = y.index_add(0, torch.tensor([token]), (weights[token, choice] * one)[None])
    return y


def through(dispatcher: Any, inputs: list[Tensor], experts: Tensor, mine: slice) -> Tensor:
    x, weights, up, down = inputs
    rows, state = dispatcher.prepare(x, experts, weights)
    batch = dispatcher.finish_dispatch(*dispatcher.launch_dispatch(rows, state))
    y = gelu_experts(batch, up[mine], down[mine])
    return torch.as_tensor(dispatcher.finish_combine(dispatcher.launch_combine(y, state), state))


def assert_same(actual: Sequence[Any], expected: Sequence[Any]) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 2), (16, 4)])
@pytest.mark.parametrize("deduplicate", [False, True, "auto"])
def test_they_have_the_gradients_of_one_process_however_rows_travel(
    num_experts: int, top_k: int, deduplicate: Any
) -> None:
    inputs = leaves(num_experts)
    inputs[1] = inputs[1].detach()[:, :top_k].contiguous().requires_grad_()
    experts = chosen(num_experts, top_k)
    x, weights, up, down = inputs
    expected = plain(x, weights, up, down, experts)
    grads = torch.autograd.grad(expected.square().sum(), inputs)

    def rank_main(group: dist.ProcessGroup) -> list[Tensor]:
        mine = [x.detach().clone().requires_grad_() for x in inputs]
        share = num_experts // group.size()
        experts_here = slice(group.rank() * share, (group.rank() + 1) * share)
        dispatcher = AllToAllDispatcher(group, num_experts, deduplicate)
        y = through(dispatcher, mine, experts, experts_here)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), mine)]

    found = run_in_threads(rank_main, world_size=2)
    for mine in found:
        assert_same(mine[:3], [expected, *grads[:2]])
    # Each expert got the same tokens from both ranks.
    both = [sum(parts) for parts in zip(*(mine[3:] for mine in found), strict=True)]
    assert_same(both, [2 * grad for grad in grads[2:]])


def test_padding_adds_nothing_and_gets_no_gradient() -> None:
    inputs, experts = leaves(4), chosen(4, 4)
    _, batch = LocalDispatcher(4).prepare(inputs[0], experts, inputs[1])
    values = torch.randn(batch.order.numel(), DIM, dtype=torch.float64, requires_grad=True)
    expected = batch.sum_over_slots(values, batch.weights)
    padded = batch._replace(counts=None, order=torch.cat([batch.order, batch.order[:2]]))
    nan = torch.full((2, DIM), torch.nan, dtype=torch.float64)
    more = torch.cat([values.detach(), nan]).requires_grad_()
    actual = padded.sum_over_slots(more, padded.weights)
    upstream = torch.randn_like(expected)
    grads = torch.autograd.grad(expected, [values, inputs[1]], upstream)
    found = torch.autograd.grad(actual, [more, inputs[1]], upstream)
    assert_same([actual, found[0][:-2], found[1]], [expected, *grads])
    assert (found[0][-2:] == 0).all()
    # Without weights as well.
    once = torch.autograd.grad(batch.sum_over_slots(values), values, upstream)[0]
    assert torch.equal(once, upstream[batch.row_at()])


def test_an_activation_that_is_none_is_refused_when_the_module_is_made() -> None:
    with pytest.raises(ValueError, match=r"activation \('gelu'\) must be an Activation, .*slots"):
        GroupedExperts(4, DIM, HIDDEN, activation="gelu")  # type: ignore[arg-type]
