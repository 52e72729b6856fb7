"""Slots that are dropped where experts have a capacity per sequence."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_expert import ExpertParallel, GroupedExperts, MoE, TopKRouter
from hp_expert.routing.capacity import DropPolicy
from hp_platform.testing import compare, run_in_threads

pytestmark = pytest.mark.usefixtures("one_thread")

EXPERTS, CHOICES = 4, 2


def router(**changes: object) -> TopKRouter:
    torch.manual_seed(0)
    settings_ = {"dim": 6, "num_experts": EXPERTS, "top_k": CHOICES} | changes
    return TopKRouter(**settings_)  # type: ignore[arg-type]


def kept_plainly(
    experts: list[list[int]], weights: list[list[float]], *, capacity: int, policy: DropPolicy
) -> set[tuple[int, int]]:
    """Return a mask of the slots of one sequence that experts take, computed expert by expert."""
    kept: set[tuple[int, int]] = set()
    for expert in range(EXPERTS):
        slots = [(t, k) for t, row in enumerate(experts) for k, e in enumerate(row) if e == expert]
        if policy == "score":
            slots.sort(key=lambda slot: (-weights[slot[0]][slot[1]], slot[0]))
        kept |= set(slots[:capacity])
    return kept


@pytest.mark.parametrize("policy", ["score", "position"])
@given(
    logits=st.lists(
        st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=5, max_size=5),
        min_size=1,
        max_size=3,
    ),
    factor=st.sampled_from([0.1, 0.5, 1.0, 1.1, 1.25, 2.0]),
)
@settings(deadline=None, max_examples=40)
def test_each_expert_takes_the_best_slots_of_each_sequence(
    policy: DropPolicy, logits: list[list[list[int]]], factor: float
) -> None:
    given_logits = torch.tensor(logits, dtype=torch.float64)
    full = router().route(given_logits)
    routing = router(capacity_factor=factor, drop_policy=policy).route(given_logits)
    capacity = math.ceil(round(factor * 100) * 5 * CHOICES / (100 * EXPERTS))
    for b in range(len(logits)):
        here = slice(5 * b, 5 * b + 5)
        kept = kept_plainly(
            full.experts[here].tolist(),
            full.weights[here].tolist(),
            capacity=capacity,
            policy=policy,
        )
        for t in range(5):
            for k in range(CHOICES):
                row = 5 * b + t
                is_kept = (t, k) in kept
                assert routing.experts[row, k] == (full.experts[row, k] if is_kept else -1)
                assert routing.weights[row, k] == (full.weights[row, k] if is_kept else 0)


def test_a_sequence_is_the_same_in_any_batch() -> None:
    module, logits = router(capacity_factor=0.75), torch.randn(4, 9, EXPERTS).round()
    whole = module.route(logits)
    parts = [module.route(part) for part in logits.split([1, 3])]
    assert torch.equal(whole.experts, torch.cat([part.experts for part in parts]))
    assert torch.equal(whole.weights, torch.cat([part.weights for part in parts]))
    assert (whole.experts == -1).any()


def test_what_is_left_keeps_its_weight() -> None:
    logits = torch.randn(3, 9, EXPERTS)
    full, routing = router().route(logits), router(capacity_factor=0.5).route(logits)
    is_left = routing.experts >= 0
    assert torch.equal(routing.weights[is_left], full.weights[is_left])
    assert not routing.weights[~is_left].any()


def test_what_was_chosen_is_known_after_the_drop() -> None:
    logits = torch.randn(3, 9, EXPERTS)
    routing = router(capacity_factor=0.5).route(logits)
    assert torch.equal(routing.chosen, router().route(logits).experts)
    assert router().route(logits).before_drop is None


def test_a_factor_is_the_number_that_was_written() -> None:
    # 1.1 * 10 in floating point is a bit more than 11.
    logits = torch.zeros(20, EXPERTS)
    routing = router(capacity_factor=1.1, drop_policy="position").route(logits)
    assert (routing.experts == 0).sum() == 11


def test_room_for_all_drops_nothing() -> None:
    logits = torch.randn(3, 9, EXPERTS)
    routing = router(capacity_factor=EXPERTS).route(logits)
    assert torch.equal(routing.experts, router().route(logits).experts)


def test_dropped_slots_give_no_gradient_and_the_others_the_right_one() -> None:
    module = router(capacity_factor=0.5).double()
    logits = torch.randn(2, 5, EXPERTS, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: module.route(x).weights, (logits,))
    all_dropped = (module.route(logits).experts == -1).all(dim=1)
    assert all_dropped.any()
    (gradient,) = torch.autograd.grad(module.route(logits).weights.square().sum(), logits)
    assert not gradient.flatten(0, 1)[all_dropped].any()


def test_the_load_counts_what_was_wanted() -> None:
    module = router(capacity_factor=0.5)
    logits = torch.randn(3, 9, EXPERTS, requires_grad=True)
    routing = module.route(logits)
    routing.weights.sum().backward()
    assert module.load.sum() == 27 * CHOICES
    assert torch.equal(module.load, routing.chosen.flatten().bincount(minlength=EXPERTS))


def test_one_row_of_tokens_is_one_sequence() -> None:
    logits = torch.randn(1, 9, EXPERTS)
    module = router(capacity_factor=0.5)
    assert torch.equal(module.route(logits[0]).experts, module.route(logits).experts)


def layer(group: ProcessGroup | None) -> MoE:
    """The same layer on every rank, which may be a thread of this process."""
    moe = MoE(router(capacity_factor=0.75), GroupedExperts(EXPERTS, 6, 8)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moe.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn)
    if group is not None:
        ExpertParallel().apply(moe, group)
    return moe


def sequences() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 9, 6, generator=generator, dtype=torch.float64)


def results(moe: MoE, x: Tensor, *, microbatch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, input gradients, and the router's gradient."""
    x = x.clone().requires_grad_()
    ys = [moe(part)[0] for part in x.split(microbatch)]
    for y in ys:
        y.square().sum().backward()
    assert x.grad is not None
    assert moe.router.weight.grad is not None
    return torch.cat(ys).detach(), x.grad, moe.router.weight.grad


def plainly(moe: MoE, x: Tensor) -> Tensor:
    routing, w = moe.router(x), moe.experts
    rows = x.flatten(0, 1)
    y = torch.zeros_like(rows)
    for weight_T, expert_T in zip(routing.weights.T, routing.experts.T, strict=True):
        for t, e in enumerate(expert_T.tolist()):
            if e >= 0:
                hidden = F.silu(w.w1[e] @ rows[t]) * (w.w3[e] @ rows[t])
                y[t] += weight_T[t] * (w.w2[e] @ hidden)
    return y.view_as(x)


def test_a_dropped_slot_adds_nothing_to_the_layers_output() -> None:
    moe, x = layer(None), sequences()
    y, routing = moe(x)
    assert (routing.experts == -1).any()
    with torch.no_grad():
        assert torch.allclose(y, plainly(moe, x), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("microbatch", [1, 2])
def test_neither_ranks_nor_microbatches_change_what_is_dropped(microbatch: int) -> None:
    def on_rank(group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
        mine = sequences().chunk(2)[group.rank()]
        return results(layer(group), mine, microbatch=microbatch)

    ranks = run_in_threads(on_rank, world_size=2, timeout=30)
    y, dx, d_router = results(layer(None), sequences(), microbatch=4)
    names = ("y", "dx", "router")
    actual = (
        torch.cat([rank[0] for rank in ranks]),
        torch.cat([rank[1] for rank in ranks]),
        ranks[0][2] + ranks[1][2],
    )
    comparison = compare(
        dict(zip(names, actual, strict=True)), {"y": y, "dx": dx, "router": d_router}, bound=1e-12
    )
    assert comparison.ok, str(comparison)
