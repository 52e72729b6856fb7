"""The choice of experts for a token, and losses for their equal use."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hp_expert import TopKRouter, sequence_balance_loss
from hp_expert.routing.router import ScoreFunction, top_k_experts
from hp_platform import WeightGradQueue


def router(**changes: object) -> TopKRouter:
    torch.manual_seed(0)
    settings_ = {"dim": 6, "num_experts": 8, "top_k": 3} | changes
    return TopKRouter(**settings_)  # type: ignore[arg-type]


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_chosen_experts_have_the_highest_scores(score_function: ScoreFunction) -> None:
    routing = router(score_function=score_function).double()(torch.randn(50, 6).double())
    top, experts = routing.scores.topk(3)
    assert torch.equal(routing.experts, experts)
    assert torch.allclose(routing.weights, top / top.sum(-1, keepdim=True), rtol=1e-14)
    assert routing.scores.shape == (50, 8)


def test_without_normalisation_weights_are_the_scores() -> None:
    routing = router(normalize=False)(torch.randn(50, 6))
    assert torch.equal(routing.weights, routing.scores.gather(1, routing.experts))


@given(
    st.integers(0, 12).flatmap(
        lambda rows: st.lists(
            st.lists(st.integers(0, 3), min_size=7, max_size=7), min_size=rows, max_size=rows
        )
    ),
    st.integers(1, 7),
)
@settings(deadline=None, max_examples=30)
def test_of_equal_scores_the_lower_expert_wins(scores: list[list[int]], top_k: int) -> None:
    chosen = top_k_experts(torch.tensor(scores, dtype=torch.float32).view(-1, 7), top_k)
    for row, experts in zip(scores, chosen.tolist(), strict=True):
        assert experts == sorted(range(7), key=lambda e: (-row[e], e))[:top_k]


@pytest.mark.parametrize(
    ("given_dtype", "wide"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_scores_are_fp32_or_wider(given_dtype: torch.dtype, wide: torch.dtype) -> None:
    module, x = router().to(given_dtype), torch.randn(20, 6).to(given_dtype)
    routing = module(x)
    assert {routing.scores.dtype, routing.weights.dtype} == {wide}
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x).scores, routing.scores)
    exact = (x.double() @ module.weight.double().T).softmax(-1)
    assert (routing.scores - exact).abs().max() < 4 * torch.finfo(wide).eps


@pytest.mark.parametrize("given_dtype", [torch.bfloat16, torch.float32])
def test_a_router_may_be_wider_than_its_tokens(given_dtype: torch.dtype) -> None:
    module, x = router().double(), torch.randn(20, 6).to(given_dtype)
    assert torch.equal(module(x).scores, module(x.double()).scores)


def test_narrow_logits_are_scored_in_fp32() -> None:
    logits = torch.randn(20, 8).bfloat16()
    routing = router().route(logits)
    assert routing.logits.dtype == torch.float32
    assert torch.equal(routing.scores, logits.float().softmax(-1))


def test_gradients_reach_router_and_tokens_through_the_chosen_scores() -> None:
    module = router(score_function="sigmoid").double()

    def weights(x: Tensor, weight: Tensor) -> Tensor:
        return module.route(x @ weight.T).weights

    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(weights, (x, module.weight))
    expected = torch.autograd.grad(weights(x, module.weight).square().sum(), (x, module.weight))
    actual = torch.autograd.grad(module(x).weights.square().sum(), (x, module.weight))
    assert all(torch.allclose(a, e, rtol=1e-12) for a, e in zip(actual, expected, strict=True))


def test_a_weight_gradient_can_be_put_off() -> None:
    module, x = router(), torch.randn(5, 6)
    queue = WeightGradQueue()
    with queue.defer(0):
        module(x).weights.square().sum().backward()
    assert module.weight.grad is None
    queue.flush(0)
    later, module.weight.grad = module.weight.grad, None
    module(x).weights.square().sum().backward()
    assert later is not None
    assert module.weight.grad is not None
    assert torch.equal(later, module.weight.grad)


def test_replay_takes_recorded_experts_with_live_gradients() -> None:
    module, logits = router(), torch.randn(4, 8, requires_grad=True)
    recorded = torch.tensor([[7, 0, 1]]).expand(4, 3)
    routing = module.route(logits, replay=recorded)
    assert torch.equal(routing.experts, recorded)
    chosen = logits.softmax(-1).gather(1, recorded)
    assert torch.allclose(routing.weights, chosen / chosen.sum(-1, keepdim=True))
    (gradient,) = torch.autograd.grad(routing.weights.square().sum(), logits)
    assert gradient[:, [0, 1, 7]].ne(0).all()


def test_all_sigmoids_zero_give_weights_without_nan() -> None:
    routing = router(score_function="sigmoid").route(torch.full((2, 8), -1e4))
    assert not routing.weights.isnan().any()


def test_no_tokens_give_an_empty_routing() -> None:
    routing = router()(torch.empty(0, 6))
    assert routing.experts.shape == routing.weights.shape == (0, 3)


@pytest.mark.parametrize("top_k", [0, 9])
def test_top_k_must_be_among_the_experts(top_k: int) -> None:
    with pytest.raises(ValueError, match=rf"top_k \({top_k}\) must be in \[1, num_experts \(8\)\]"):
        router(top_k=top_k)


def test_score_function_must_be_known() -> None:
    with pytest.raises(ValueError, match="score_function"):
        router(score_function="tanh")


def test_uniform_routing_costs_one() -> None:
    scores = torch.full((2, 8, 4), 0.25, dtype=torch.float64)
    experts = torch.arange(16).remainder(4).view(1, 8, 2).expand(2, 8, 2)
    loss = sequence_balance_loss(scores, experts, num_experts=4)
    assert torch.equal(loss, torch.ones(2, dtype=torch.float64))


def test_sending_all_tokens_to_one_expert_costs_the_number_of_experts() -> None:
    scores = torch.tensor([1.0, 0, 0, 0]).expand(1, 8, 4)
    experts = torch.zeros(1, 8, 1, dtype=torch.int64)
    assert sequence_balance_loss(scores, experts, num_experts=4).item() == 4


def test_balance_of_a_sequence_follows_its_definition() -> None:
    torch.manual_seed(0)
    scores, experts = torch.rand(3, 5, 4).double(), torch.randint(0, 4, (3, 5, 2))
    loss = sequence_balance_loss(scores, experts, num_experts=4)
    for b in range(3):
        share = [(experts[b] == e).double().sum() / 10 * 4 for e in range(4)]
        mean = (scores[b] / scores[b].sum(-1, keepdim=True)).mean(0)
        expected = sum(f * p for f, p in zip(share, mean, strict=True))
        assert loss[b].item() == pytest.approx(float(expected), rel=1e-12)


@given(st.integers(1, 6), st.integers(0, 6), st.integers(0, 99))
@settings(deadline=None, max_examples=50)
def test_balance_of_a_sequence_does_not_depend_on_its_batch(size: int, cut: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(size, 5, 4, generator=generator)
    experts = torch.randint(0, 4, (size, 5, 2), generator=generator)
    whole = sequence_balance_loss(scores, experts, num_experts=4)
    parts = [
        sequence_balance_loss(s, e, num_experts=4)
        for s, e in ((scores[:cut], experts[:cut]), (scores[cut:], experts[cut:]))
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_balance_has_gradients_for_scores() -> None:
    torch.manual_seed(0)
    scores = torch.rand(2, 3, 4, dtype=torch.float64, requires_grad=True)
    experts = torch.randint(0, 4, (2, 3, 2))
    assert torch.autograd.gradcheck(
        lambda s: sequence_balance_loss(s, experts, num_experts=4), (scores,)
    )


def test_balance_of_empty_sequences_is_zero() -> None:
    loss = sequence_balance_loss(
        torch.empty(2, 0, 4), torch.empty(2, 0, 2, dtype=torch.int64), num_experts=4
    )
    assert loss.tolist() == [0, 0]


def test_balance_refuses_shapes_that_do_not_fit() -> None:
    scores, experts = torch.rand(2, 3, 4), torch.zeros(2, 3, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"must be \[B, S, num_experts \(5\)\]"):
        sequence_balance_loss(scores, experts, num_experts=5)
    with pytest.raises(ValueError, match=r"experts .* must be \[B, S, K\]"):
        sequence_balance_loss(scores, experts.flatten(0, 1), num_experts=4)
