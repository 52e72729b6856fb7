"""Losses of the routers, whole and in parts on several ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_expert import (
    Routing,
    TopKRouter,
    document_balance_loss,
    global_balance_loss,
    router_z_loss,
    sequence_balance_loss,
)
from hp_platform import new_group
from hp_platform.testing import run_distributed, run_in_threads

pytestmark = pytest.mark.usefixtures("one_thread")

EXPERTS, CHOICES, SEQUENCES, POSITIONS, DIM = 5, 2, 3, 12, 6
CUTS = {1: [12], 2: [5, 7], 3: [4, 0, 8]}  # uneven parts of a sequence, and an empty one


def draw() -> tuple[Tensor, Tensor]:
    """Scores [B, S, E] and experts [B, S, K], one of which went nowhere."""
    generator = torch.Generator().manual_seed(0)
    shape = (SEQUENCES, POSITIONS, EXPERTS)
    scores = torch.rand(shape, generator=generator, dtype=torch.float64)
    experts = scores.topk(CHOICES).indices
    experts[0, 3, 1] = -1
    return scores, experts


def parts_of(x: Tensor, world_size: int, rank: int) -> Tensor:
    part: Tensor = x.split(CUTS[world_size], dim=1)[rank]
    return part.clone()


def with_gradient(loss: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.arange(1, loss.numel() + 1, dtype=loss.dtype).view(loss.shape)
    (gradient,) = torch.autograd.grad((loss * values).sum(), scores)
    return loss.detach(), gradient


@pytest.mark.parametrize("loss_of", [sequence_balance_loss, global_balance_loss])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parts_on_ranks_add_up_to_the_whole(loss_of: Any, world_size: int) -> None:
    def on_rank(group: ProcessGroup) -> tuple[Tensor, Tensor]:
        scores, experts = (parts_of(x, world_size, group.rank()) for x in draw())
        scores.requires_grad_()
        return with_gradient(loss_of(scores, experts, num_experts=EXPERTS, group=group), scores)

    scores, experts = draw()
    scores.requires_grad_()
    value, gradient = with_gradient(loss_of(scores, experts, num_experts=EXPERTS), scores)
    results = run_in_threads(on_rank, world_size=world_size, timeout=30)
    total = torch.stack([part for part, _ in results]).sum(0)
    assert torch.allclose(total, value, rtol=1e-13, atol=0)
    together = torch.cat([part for _, part in results], dim=1)
    assert torch.allclose(together, gradient, rtol=1e-12, atol=1e-15)


DOCUMENTS = [3, 1, 5, 2]  # and one position of padding


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_documents_that_are_packed_have_the_values_they_have_alone(world_size: int) -> None:
    def on_rank(group: ProcessGroup) -> tuple[Tensor, Tensor]:
        scores, experts, place = (
            parts_of(x[:1], world_size, group.rank())[0] for x in (*draw(), order[None])
        )
        scores.requires_grad_()
        owner, group_or_none = owners[place], None if world_size == 1 else group
        loss = document_balance_loss(scores, experts, owner, lengths, group=group_or_none)
        return with_gradient(loss, scores)

    lengths = torch.tensor(DOCUMENTS)
    owners = torch.tensor([i for i, n in enumerate(DOCUMENTS) for _ in range(n)] + [-1])
    order = torch.randperm(POSITIONS, generator=torch.Generator().manual_seed(1))
    results = run_in_threads(on_rank, world_size=world_size, timeout=30)
    scores, experts = (x[0] for x in draw())
    scores.requires_grad_()
    alone = []
    for document in range(len(DOCUMENTS)):
        here = (owners[order] == document).nonzero().flatten()
        alone.append(
            sequence_balance_loss(scores[None, here], experts[None, here], num_experts=EXPERTS)
        )
    value, gradient = with_gradient(torch.cat(alone), scores)
    total = torch.stack([part for part, _ in results]).sum(0)
    assert torch.allclose(total, value, rtol=1e-13, atol=0)
    assert torch.allclose(
        torch.cat([part for _, part in results]), gradient, rtol=1e-12, atol=1e-15
    )
    assert (gradient[owners[order] < 0] == 0).all()


def test_documents_must_have_an_entry_for_each_token() -> None:
    scores, experts = (x[0] for x in draw())
    with pytest.raises(ValueError, match=r"documents \(\(3,\)\) must be"):
        document_balance_loss(scores, experts, torch.zeros(3).long(), torch.tensor([12]))


def test_a_group_of_one_rank_changes_no_bit() -> None:
    scores, experts = (x.float() if x.is_floating_point() else x for x in draw())

    def on_rank(group: ProcessGroup) -> Tensor:
        return sequence_balance_loss(scores, experts, num_experts=EXPERTS, group=group)

    (alone,) = run_in_threads(on_rank, world_size=1, timeout=30)
    assert torch.equal(alone, sequence_balance_loss(scores, experts, num_experts=EXPERTS))


def test_the_global_loss_follows_its_definition() -> None:
    scores, experts = draw()
    flat = scores.flatten(0, 1) / scores.flatten(0, 1).sum(-1, keepdim=True)
    num_slots = SEQUENCES * POSITIONS * CHOICES
    expected = sum(
        EXPERTS * (experts == e).sum().double() / num_slots * flat[:, e].mean()
        for e in range(EXPERTS)
    )
    loss = global_balance_loss(scores, experts, num_experts=EXPERTS)
    assert loss.item() == pytest.approx(float(expected), rel=1e-12)
    flat_loss = global_balance_loss(
        scores.flatten(0, 1), experts.flatten(0, 1), num_experts=EXPERTS
    )
    assert torch.equal(flat_loss, loss)


def test_only_the_loss_per_sequence_is_the_same_for_all_microbatches() -> None:
    scores, experts = draw()

    def in_microbatches(loss_of: Any, size: int) -> float:
        cut = zip(scores.split(size), experts.split(size), strict=True)
        return float(sum(loss_of(s, e, num_experts=EXPERTS).sum() for s, e in cut))

    whole, cut = (in_microbatches(sequence_balance_loss, size) for size in (3, 1))
    assert cut == pytest.approx(whole, rel=1e-13)
    whole, cut = (in_microbatches(global_balance_loss, size) for size in (3, 1))
    assert abs(cut / 3 - whole) > 1e-3


def test_the_z_loss_is_the_mean_square_of_the_log_of_the_sum() -> None:
    logits = torch.randn(4, 7, EXPERTS, dtype=torch.float64)
    expected = logits.exp().sum(-1).log().square().mean()
    assert torch.allclose(router_z_loss(logits), expected, rtol=1e-12)
    assert router_z_loss(torch.empty(0, EXPERTS)).item() == 0
    assert router_z_loss(logits.bfloat16()).dtype == torch.float32


def test_with_the_tokens_of_the_step_the_z_loss_is_the_same_for_all_microbatches() -> None:
    logits = torch.randn(4, 7, EXPERTS, dtype=torch.float64, requires_grad=True)
    whole = router_z_loss(logits, num_tokens=28)
    assert torch.equal(whole, router_z_loss(logits))
    cut = torch.stack([router_z_loss(part, num_tokens=28) for part in logits.split([1, 3])]).sum()
    assert torch.allclose(cut, whole, rtol=1e-13)
    of_whole, of_cut = (torch.autograd.grad(loss, logits)[0] for loss in (whole, cut))
    assert torch.allclose(of_cut, of_whole, rtol=1e-12, atol=1e-16)
    assert torch.autograd.gradcheck(router_z_loss, (logits,))


def router() -> TopKRouter:
    module = TopKRouter(DIM, EXPERTS, CHOICES).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        drawn = torch.randn(module.weight.shape, generator=generator, dtype=torch.float64)
        module.weight.copy_(drawn)
    return module


def tokens(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(1, POSITIONS, DIM, generator=generator, dtype=torch.float64)


def all_losses(module: TopKRouter, x: Tensor, group: ProcessGroup | None) -> Tensor:
    routing: Routing = module(x)
    scores, experts = routing.scores.unsqueeze(0), routing.chosen.unsqueeze(0)
    return (
        sequence_balance_loss(scores, experts, num_experts=EXPERTS).sum() / 2
        + global_balance_loss(scores, experts, num_experts=EXPERTS, group=group)
        + router_z_loss(routing.logits, num_tokens=2 * POSITIONS)
        + (routing.weights * torch.tensor([1.0, -2.0], dtype=torch.float64)).sum()
    )


def on_four_ranks() -> tuple[Tensor, Tensor]:
    """Two tensor-parallel groups, each of two ranks with the same tokens."""
    data = new_group([[0, 2], [1, 3]], name="dp")
    assert data is not None
    module = router()
    all_losses(module, tokens(data.rank()), data).backward()
    assert module.weight.grad is not None
    summed = module.weight.grad.clone()
    dist.all_reduce(summed, group=data)
    return module.weight.grad, summed


def test_ranks_with_the_same_tokens_each_have_the_complete_gradient() -> None:
    results = run_distributed(on_four_ranks, world_size=4)
    module = router()
    routing = [module(tokens(rank)) for rank in range(2)]
    scores = torch.stack([r.scores for r in routing])
    experts = torch.stack([r.chosen for r in routing])
    weights = torch.cat([r.weights for r in routing])
    loss = (
        sequence_balance_loss(scores, experts, num_experts=EXPERTS).sum() / 2
        + global_balance_loss(scores, experts, num_experts=EXPERTS)
        + router_z_loss(torch.cat([r.logits for r in routing]))
        + (weights * torch.tensor([1.0, -2.0], dtype=torch.float64)).sum()
    )
    loss.backward()
    assert module.weight.grad is not None
    for first in (0, 2):  # of a tensor-parallel group: nothing is to be summed over it
        assert torch.equal(results[first][0], results[first + 1][0])
    for _, summed in results:
        assert torch.allclose(summed, module.weight.grad, rtol=1e-12, atol=1e-14)


def test_a_group_does_not_excuse_shapes_that_do_not_fit() -> None:
    scores, experts = draw()
    with pytest.raises(ValueError, match=r"experts .* must be \[B, S, K\]"):
        sequence_balance_loss(scores, experts[:, 1:], num_experts=EXPERTS)
    with pytest.raises(ValueError, match=r"must be \[B, S, num_experts \(4\)\]"):
        global_balance_loss(scores, experts, num_experts=4)
