"""The choice of experts by scores, bias and groups, and their weights."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hp_expert import TopKRouter
from hp_expert.routing.router import GroupScore

pytestmark = pytest.mark.usefixtures("one_thread")


def router(**changes: object) -> TopKRouter:
    torch.manual_seed(0)
    settings_ = {"dim": 6, "num_experts": 12, "top_k": 3} | changes
    return TopKRouter(**settings_).double()  # type: ignore[arg-type]


def limited_choice(
    scores: list[float], *, groups: int, limited: int, top_k: int, group_score: GroupScore
) -> list[int]:
    """Node-limited routing written down plainly, as in the papers; lower indices win."""
    size = len(scores) // groups
    parts = [sorted(scores[g * size : (g + 1) * size], reverse=True) for g in range(groups)]
    worth = [part[0] if group_score == "max" else part[0] + part[1] for part in parts]
    best = sorted(range(groups), key=lambda g: (-worth[g], g))[:limited]
    allowed = [e for e in range(len(scores)) if e // size in best]
    return sorted(allowed, key=lambda e: (-scores[e], e))[:top_k]


@pytest.mark.parametrize("group_score", ["max", "top2_sum"])
@given(
    scores=st.lists(st.lists(st.integers(-2, 3), min_size=12, max_size=12), max_size=5),
    bias=st.lists(st.integers(-3, 3), min_size=12, max_size=12),
    limited=st.integers(1, 4),
)
@settings(deadline=None, max_examples=40)
def test_experts_come_from_the_best_groups_and_lower_indices_win(
    group_score: GroupScore, scores: list[list[int]], bias: list[int], limited: int
) -> None:
    module = router(
        num_groups=4, num_limited_groups=limited, group_score=group_score, correction_bias=True
    )
    assert module.correction_bias is not None
    # Biases far larger than scores, and both in few steps: ties and negative sums are common.
    module.correction_bias.copy_(torch.tensor(bias))
    logits = torch.tensor(scores, dtype=torch.float64).view(-1, 12)
    routing = module.route(logits)
    for row, experts in zip(routing.scores.tolist(), routing.experts.tolist(), strict=True):
        biased = [score + b for score, b in zip(row, bias, strict=True)]
        assert experts == limited_choice(
            biased, groups=4, limited=limited, top_k=3, group_score=group_score
        )


def test_groups_of_equal_worth_are_taken_in_order() -> None:
    module = router(num_groups=4, num_limited_groups=2)
    assert module.route(torch.zeros(2, 12)).experts.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_all_groups_are_no_limit() -> None:
    logits = torch.randn(20, 12, dtype=torch.float64)
    limited = router(num_groups=4, num_limited_groups=4).route(logits)
    assert torch.equal(limited.experts, router().route(logits).experts)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_a_correction_bias_changes_the_choice_and_never_the_weights(score_function: str) -> None:
    module = router(score_function=score_function, correction_bias=True)
    assert module.correction_bias is not None
    logits = torch.randn(30, 12, dtype=torch.float64, requires_grad=True)
    plain = module.route(logits)
    module.correction_bias[4] = 2.0
    biased = module.route(logits)
    assert (biased.experts[:, 0] == 4).all()
    assert not (plain.experts == 4).any(dim=1).all()
    assert torch.equal(biased.scores, plain.scores)
    chosen = plain.scores.gather(1, biased.experts)
    assert torch.equal(biased.weights, chosen / chosen.sum(-1, keepdim=True))
    (gradient,) = torch.autograd.grad(biased.weights.square().sum(), logits)
    (expected,) = torch.autograd.grad(
        (chosen / chosen.sum(-1, keepdim=True)).square().sum(), logits
    )
    assert torch.allclose(gradient, expected, rtol=1e-12, atol=1e-15)
    assert not module.correction_bias.requires_grad


def test_normalised_softmax_is_the_softmax_over_the_chosen_logits() -> None:
    logits = torch.randn(30, 12, dtype=torch.float64)
    top, experts = logits.topk(3)
    routing = router().route(logits)
    assert torch.equal(routing.experts, experts)
    assert torch.allclose(routing.weights, top.softmax(-1), rtol=1e-13)


def test_weights_are_scaled_at_last() -> None:
    logits = torch.randn(30, 12, dtype=torch.float64)
    scaled = router(scaling_factor=2.5).route(logits)
    assert torch.equal(scaled.weights, router().route(logits).weights * 2.5)
    assert torch.allclose(scaled.weights.sum(-1), torch.tensor(2.5, dtype=torch.float64))


def test_logits_may_have_a_bias_that_is_trained() -> None:
    module, x = router(bias=True), torch.randn(9, 6, dtype=torch.float64)
    assert module.bias is not None
    assert not module.bias.any()
    with torch.no_grad():
        module.bias.copy_(torch.randn(12))
    routing = module(x)
    assert torch.allclose(routing.logits, x @ module.weight.T + module.bias, rtol=1e-12)
    routing.weights.square().sum().backward()
    assert module.bias.grad is not None
    assert module.bias.grad.any()


def test_scores_come_from_the_logits_that_are_returned() -> None:
    routing = router()(torch.randn(2, 5, 6))
    assert torch.equal(routing.scores, routing.logits.softmax(-1))
    assert routing.logits.shape == (10, 12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_groups": 5}, r"num_groups \(5\) must divide num_experts \(12\)"),
        ({"num_groups": 0}, r"num_groups \(0\) must divide"),
        (
            {"num_groups": 4, "num_limited_groups": 5},
            r"num_limited_groups \(5\) must be in \[1, num_groups \(4\)\]",
        ),
        (
            {"num_groups": 6, "num_limited_groups": 1},
            r"top_k \(3\) must be at most num_limited_groups \(1\) \* experts of a group \(2\)",
        ),
        ({"num_groups": 12, "num_limited_groups": 3}, r"experts of a group \(1\) must be at least"),
        ({"group_score": "mean"}, r"group_score \(mean\) must be max or top2_sum"),
        ({"drop_policy": "probs"}, r"drop_policy \(probs\) must be score or position"),
        ({"capacity_factor": 0.0}, r"capacity_factor \(0.0\) must be positive"),
        ({"capacity_factor": -math.inf}, r"capacity_factor \(-inf\) must be"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        router(**changes)


def test_the_router_shows_what_it_does() -> None:
    shown = repr(router(num_groups=4, num_limited_groups=2, capacity_factor=1.25))
    assert "groups=2 of 4 (top2_sum)" in shown
    assert "capacity_factor=1.25 (score)" in shown


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("ties", [False, True])
def test_cuda_chooses_as_the_cpu_does(ties: bool) -> None:
    module = router(num_groups=4, num_limited_groups=2, capacity_factor=1.0)
    logits = torch.randn(2, 40, 12, dtype=torch.float64)
    logits = logits.round() if ties else logits
    here, there = module.route(logits), module.cuda().route(logits.cuda())
    assert torch.equal(there.experts.cpu(), here.experts)


def test_a_batch_of_no_tokens_can_be_limited() -> None:
    module = router(num_groups=4, num_limited_groups=2, capacity_factor=1.0, correction_bias=True)
    routing = module(torch.empty(2, 0, 6))
    assert routing.experts.shape == routing.weights.shape == (0, 3)


def groups_of(x: Tensor) -> Tensor:
    return x.div(3, rounding_mode="floor")


def test_no_token_reaches_more_groups_than_allowed() -> None:
    module = router(num_groups=4, num_limited_groups=2)
    experts = module(torch.randn(200, 6)).experts
    assert max(len(set(row)) for row in groups_of(experts).tolist()) == 2
