"""Experts that were recorded elsewhere, with gradients of this model."""

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_expert import ExpertParallel, GroupedExperts, MoE, TopKRouter, check_replay
from hp_platform import PeerError
from hp_platform.testing import run_in_threads

pytestmark = pytest.mark.usefixtures("one_thread")

DIM, HIDDEN, EXPERTS, CHOICES = 6, 8, 6, 2


def layer(*, seed: int = 0, **changes: object) -> MoE:
    torch.manual_seed(seed)
    router = TopKRouter(DIM, EXPERTS, CHOICES, **changes)  # type: ignore[arg-type]
    return MoE(router, GroupedExperts(EXPERTS, DIM, HIDDEN)).double()


def perturbed(moe: MoE, scale: float) -> MoE:
    """The same model a little elsewhere: as in a rollout of older or rounded weights."""
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=scale)
    return moe


def tokens() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 20, DIM, dtype=torch.float64)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_a_training_step_goes_where_the_rollout_went(score_function: str) -> None:
    x = tokens()
    rollout = perturbed(layer(score_function=score_function), 0.1)
    rollout.eval()
    with torch.no_grad():
        recorded = rollout(x)[1].experts
    moe = layer(score_function=score_function)
    assert not torch.equal(moe(x)[1].experts, recorded)
    y, routing = moe(x, replay=recorded)
    assert torch.equal(routing.experts, recorded)
    y.square().sum().backward()
    for parameter in moe.parameters():
        assert parameter.grad is not None
        check_by_differences(moe, parameter, x, recorded)


def check_by_differences(moe: MoE, parameter: Tensor, x: Tensor, recorded: Tensor) -> None:
    """The gradient along a random direction, against central differences."""
    assert parameter.grad is not None
    direction = torch.randn_like(parameter)
    values = []
    with torch.no_grad():
        for step in (1e-6, -1e-6):
            parameter += step * direction
            values.append(moe(x, replay=recorded)[0].square().sum())
            parameter -= step * direction
    expected = (values[0] - values[1]) / 2e-6
    actual = (parameter.grad * direction).sum()
    assert torch.allclose(actual, expected, rtol=1e-6)


def test_replaying_a_models_own_routing_changes_no_bit() -> None:
    moe, x = layer(scaling_factor=2.0), tokens()
    y, routing = moe(x)
    again, replayed = moe(x, replay=routing.experts)
    assert torch.equal(again, y)
    assert torch.equal(replayed.weights, routing.weights)


def test_a_slot_without_expert_counts_nothing() -> None:
    module, logits = layer().router, torch.randn(3, EXPERTS, dtype=torch.float64)
    record = torch.tensor([[1, -1], [2, 3], [-1, -1]])
    routing = module.route(logits, replay=record)
    assert torch.equal(routing.experts, record)
    assert routing.weights[0].tolist() == [1, 0]
    assert routing.weights[2].tolist() == [0, 0]
    chosen = routing.scores[1, 2:4]
    assert torch.allclose(routing.weights[1], chosen / chosen.sum())


def test_replayed_slots_are_counted_where_they_went() -> None:
    module = layer().router
    logits = torch.randn(2, EXPERTS, dtype=torch.float64, requires_grad=True)
    module.route(logits, replay=torch.tensor([[1, 5], [-1, 5]])).weights.sum().backward()
    assert module.load.tolist() == [0, 1, 0, 0, 0, 2]


def test_a_record_is_not_dropped_from_again() -> None:
    module, logits = layer(capacity_factor=0.1).router, torch.randn(4, EXPERTS)
    record = torch.tensor([[1, 2]]).expand(4, 2)
    assert torch.equal(module.route(logits, replay=record).experts, record)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (torch.zeros(3, CHOICES, dtype=torch.int64), r"replay .* must be int64 and \[num_tokens"),
        (torch.zeros(2, 3, dtype=torch.int64), r"top_k \(2\)\]"),
        (torch.zeros(2, CHOICES, dtype=torch.int32), r"replay \(\(2, 2\), torch.int32\) must be"),
        (torch.tensor([[0, 6], [1, 2]]), r"must be in \[-1, num_experts \(6\)\), but 1 are not"),
        (torch.tensor([[0, -2], [1, 2]]), r"must be in \[-1, .* but 1 are not"),
        (torch.tensor([[0, 1], [2, 2]]), r"must be distinct, but 1 are there before"),
    ],
)
def test_a_wrong_record_is_refused(record: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer().router.route(torch.randn(2, EXPERTS), replay=record)
    with pytest.raises(ValueError, match=message):
        check_replay(record, num_tokens=2, top_k=CHOICES, num_experts=EXPERTS)


def replay_on_ranks(group: ProcessGroup, *, wrong_rank: int | None) -> list[int] | str:
    moe = ExpertParallel().apply(layer(), group)
    record = torch.tensor([[0, 1], [4, 5], [5, 0]])
    if group.rank() == wrong_rank:
        record = record.repeat(2, 1)
    try:
        _, routing = moe(torch.randn(3, DIM, dtype=torch.float64), replay=record)
    except (ValueError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    experts: list[int] = routing.experts.flatten().tolist()
    return experts


def test_ranks_replay_together_or_refuse_together() -> None:
    fine = run_in_threads(lambda g: replay_on_ranks(g, wrong_rank=None), world_size=2, timeout=30)
    assert fine == [[0, 1, 4, 5, 5, 0]] * 2
    first, second = run_in_threads(
        lambda g: replay_on_ranks(g, wrong_rank=1), world_size=2, timeout=30
    )
    assert str(first).startswith("PeerError: rank 1 ")
    assert str(second).startswith("ValueError: replay ((6, 2), torch.int64) must be int64")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_host_does_not_look_into_the_record() -> None:
    module = layer().router.cuda()
    record = torch.tensor([[0, 6], [1, 1]], device="cuda")
    logits = torch.randn(2, EXPERTS, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        routing = module.route(logits, replay=record)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert routing.weights[0].tolist() == [1, 0]
    with pytest.raises(ValueError, match="but 1 are not"):
        check_replay(record, num_tokens=2, top_k=2, num_experts=EXPERTS)
