"""Loads are counted once, and correction biases follow them."""

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from hp_expert import (
    GroupedExperts,
    MoE,
    Routing,
    TopKRouter,
    load_imbalance,
    register_correction_bias_update,
    save_routing,
    take_loads,
    update_correction_biases,
)
from hp_platform import new_group
from hp_platform.testing import run_distributed

pytestmark = pytest.mark.usefixtures("one_thread")

DIM, HIDDEN, EXPERTS, CHOICES = 6, 8, 4, 2


def layer(*, correction_bias: bool = True) -> MoE:
    generator = torch.Generator().manual_seed(0)
    router = TopKRouter(DIM, EXPERTS, CHOICES, correction_bias=correction_bias)
    moe = MoE(router, GroupedExperts(EXPERTS, DIM, HIDDEN))
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return moe


def correction_bias_of(router: TopKRouter) -> Tensor:
    assert router.correction_bias is not None
    return router.correction_bias


def tokens(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 5, DIM, generator=generator)


def expected_load(moe: MoE, *xs: Tensor) -> Tensor:
    with torch.no_grad():
        experts = torch.cat([moe.router(x).experts.flatten() for x in xs])
    return experts.bincount(minlength=EXPERTS)


def plainly(moe: MoE, x: Tensor) -> Tensor:
    result: tuple[Tensor, Routing] = moe(x)
    return result[0]


def reentrant(moe: MoE, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(partial(plainly, moe), x.requires_grad_(), use_reentrant=True)
    return y


def non_reentrant(moe: MoE, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(partial(plainly, moe), x, use_reentrant=False)
    return y


def saved(moe: MoE, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(partial(plainly, moe), x, use_reentrant=False, context_fn=save_routing)
    return y


def nested(moe: MoE, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(partial(non_reentrant, moe), x, use_reentrant=False)
    return y


def without_gradients_first(moe: MoE, x: Tensor) -> Tensor:
    with torch.no_grad():
        moe(x)
    return plainly(moe, x)


WAYS = [plainly, reentrant, non_reentrant, saved, nested, without_gradients_first]


@pytest.mark.parametrize("way", WAYS)
def test_each_microbatch_is_counted_once(way: Callable[[MoE, Tensor], Tensor]) -> None:
    moe, xs = layer(), [tokens(seed) for seed in range(3)]
    for x in xs:
        way(moe, x).sum().backward()
    assert moe.router.load.tolist() == expected_load(moe, *xs).tolist()


def test_microbatches_in_flight_are_counted_as_well() -> None:
    moe, xs = layer(), [tokens(seed) for seed in range(3)]
    ys = [saved(moe, x) for x in xs]
    for y in reversed(ys):
        y.sum().backward()
    assert moe.router.load.tolist() == expected_load(moe, *xs).tolist()


def test_a_router_whose_load_nothing_reads_routes_alike_and_counts_nothing() -> None:
    moe, x = layer(), tokens(0)
    y, routing = moe(x)
    y.sum().backward()
    assert moe.router.load.any()
    expected = [parameter.grad for parameter in moe.parameters()]
    moe.zero_grad()
    moe.router.load.zero_()
    moe.router.counts_load = False
    again, other = moe(x)
    again.sum().backward()
    assert torch.equal(again, y)
    assert torch.equal(other.experts, routing.experts)
    for parameter, grad in zip(moe.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert grad is not None
        assert torch.equal(parameter.grad, grad)
    assert not moe.router.load.any()


def test_what_is_not_trained_on_is_not_counted() -> None:
    moe, x = layer(), tokens(0)
    with torch.no_grad():
        moe(x)
    moe(x)  # no backward: a loss that was skipped
    moe.eval()
    moe(x)[0].sum().backward()
    assert not moe.router.load.any()


def test_threads_count_together() -> None:
    moe, xs = layer(), [tokens(seed) for seed in range(40)]

    def run(mine: list[Tensor]) -> None:
        for x in mine:
            plainly(moe, x).sum().backward()

    threads = [threading.Thread(target=run, args=(xs[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert moe.router.load.tolist() == expected_load(moe, *xs).tolist()


def test_the_bias_moves_by_the_sign_of_what_is_missing_and_the_count_starts_again() -> None:
    moe, xs = layer(), [tokens(seed) for seed in range(3)]
    bias = moe.router.correction_bias
    assert bias is not None
    for x in xs:
        plainly(moe, x).sum().backward()
    load = expected_load(moe, *xs)
    assert update_correction_biases(moe, rate=0.5)["router"].tolist() == load.tolist()
    mean = 3 * 10 * CHOICES / EXPERTS
    assert bias.tolist() == [0.5 * ((mean > n) - (mean < n)) for n in load.tolist()]
    before = bias.clone()
    assert not moe.router.load.any()
    update_correction_biases(moe, rate=0.5)
    assert torch.equal(bias, before)


def test_the_bias_may_move_by_the_error_itself() -> None:
    moe = layer()
    bias = moe.router.correction_bias
    assert bias is not None
    moe.router.load.copy_(torch.tensor([0, 2, 4, 10]))
    update_correction_biases(moe, rate=0.5, rule="error")
    assert torch.allclose(bias, torch.tensor([0.5, 0.25, 0.0, -0.75]))


def test_many_updates_make_loads_equal() -> None:
    router = layer().router
    x = torch.randn(1, 400, DIM, generator=torch.Generator().manual_seed(5))
    x[..., 0] = 1
    with torch.no_grad():
        router.weight[:, 0] = torch.tensor([2.0, 1.0, 0.0, -1.0])
    imbalance = []
    for _ in range(150):
        router(x).weights.sum().backward()
        (load,) = update_correction_biases(router, rate=5e-3).values()
        imbalance.append(load_imbalance(load).item())
    assert imbalance[0] > 1.3
    assert max(imbalance[-10:]) < 1.05


def test_an_optimizer_step_can_do_it() -> None:
    moe, x = layer(), tokens(0)
    bias = moe.router.correction_bias
    assert bias is not None
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.1)
    handle = register_correction_bias_update(optimizer, moe, rate=0.25)
    plainly(moe, x).sum().backward()
    plainly(moe, x).sum().backward()
    assert not bias.any()
    optimizer.step()
    assert set(bias.abs().tolist()) <= {0.0, 0.25}
    assert bias.any()
    assert not moe.router.load.any()
    handle.remove()
    plainly(moe, x).sum().backward()
    optimizer.step()
    assert moe.router.load.sum() == 10 * CHOICES


def test_loads_can_be_taken_without_a_bias() -> None:
    moe, x = layer(correction_bias=False), tokens(0)
    plainly(moe, x).sum().backward()
    assert update_correction_biases(moe)["router"].tolist() == expected_load(moe, x).tolist()
    assert take_loads(moe)["router"].tolist() == [0] * EXPERTS
    assert take_loads(nn.Linear(2, 2)) == {}


def test_imbalance_is_the_largest_load_over_the_mean() -> None:
    assert load_imbalance(torch.tensor([[5, 5], [9, 1], [0, 0]])).tolist() == pytest.approx(
        [1, 1.8, 0]
    )


def test_a_narrow_model_keeps_a_wide_bias() -> None:
    router = layer().router
    assert router.correction_bias is not None
    router.correction_bias.fill_(0.123456789)
    before = router.correction_bias.clone()
    assert router.bfloat16().weight.dtype == torch.bfloat16
    assert torch.equal(router.correction_bias, before)
    assert correction_bias_of(router.double()).dtype == torch.float64
    made = TopKRouter(DIM, EXPERTS, CHOICES, correction_bias=True, dtype=torch.bfloat16)
    assert made.correction_bias is not None
    assert made.correction_bias.dtype == torch.float32


def test_checkpoints_hold_the_bias_and_copies_all_of_it() -> None:
    moe = layer()
    plainly(moe, tokens(0)).sum().backward()
    update_correction_biases(moe)
    plainly(moe, tokens(1)).sum().backward()
    names = set(moe.state_dict())
    assert "router.correction_bias" in names
    assert not any("load" in name for name in names)
    resumed = layer()
    resumed.load_state_dict(moe.state_dict())
    assert torch.equal(resumed.router(tokens(2)).experts, moe.router(tokens(2)).experts)
    assert torch.equal(copy.deepcopy(moe).router.load, moe.router.load)


def test_a_model_made_on_the_meta_device_counts_as_well() -> None:
    with torch.device("meta"):
        moe = MoE(TopKRouter(DIM, EXPERTS, CHOICES), GroupedExperts(EXPERTS, DIM, HIDDEN))
    moe.load_state_dict(layer(correction_bias=False).state_dict(), assign=True)
    plainly(moe, tokens(0)).sum().backward()
    assert moe.router.load.tolist() == expected_load(moe, tokens(0)).tolist()
    empty = TopKRouter(DIM, EXPERTS, CHOICES, device="meta").to_empty(device="cpu")
    assert empty.load.tolist() == [0] * EXPERTS


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"rate": -1.0}, r"rate \(-1.0\)"), ({"rule": "median"}, r"rule \(median\) must be sign")],
)
def test_wrong_settings_are_refused(changes: dict[str, object], message: str) -> None:
    moe = layer()
    with pytest.raises(ValueError, match=message):
        update_correction_biases(moe, **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        register_correction_bias_update(
            torch.optim.SGD(moe.parameters()),
            moe,
            **changes,  # type: ignore[arg-type]
        )


def test_a_bias_that_was_made_narrow_is_refused() -> None:
    moe = layer()
    moe.router.correction_bias = torch.zeros(EXPERTS, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"correction_bias of router \(torch.bfloat16\) must be"):
        update_correction_biases(moe)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layer(), layer()

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.second(x + self.first(x)[0])
        out: Tensor = y
        return out


def on_four_ranks() -> tuple[list[list[float]], list[list[int]], int]:
    """Two groups of tensor-parallel ranks with the same tokens, each group with its own."""
    rank = dist.get_rank()
    data = new_group([[0, 2], [1, 3]], name="dp")
    assert data is not None
    calls: list[Tensor] = []
    all_reduce = dist.all_reduce

    def counted(x: Tensor, **options: Any) -> None:
        calls.append(x)
        all_reduce(x, **options)

    dist.all_reduce = counted  # type: ignore[assignment]
    model = TwoLayers()
    for seed in (0, 1):
        model(tokens(10 * (rank // 2) + seed)).sum().backward()
    loads = update_correction_biases(model, rate=0.3, rule="error", group=data)
    found = [correction_bias_of(moe.router).tolist() for moe in (model.first, model.second)]
    return found, [load.tolist() for load in loads.values()], len(calls)


def test_ranks_with_tokens_of_their_own_add_up_in_one_exchange() -> None:
    results = run_distributed(on_four_ranks, world_size=4)
    assert all(result == results[0] for result in results)
    alone = TwoLayers()
    for seed in (0, 1, 10, 11):
        alone(tokens(seed)).sum().backward()
    loads = update_correction_biases(alone, rate=0.3, rule="error")
    biases, ranks_loads, num_exchanges = results[0]
    assert ranks_loads == [load.tolist() for load in loads.values()]
    assert biases[0] == correction_bias_of(alone.first.router).tolist()
    assert biases[1] == correction_bias_of(alone.second.router).tolist()
    assert num_exchanges == 1


def under_ddp() -> tuple[list[int], list[int]]:
    """Two steps of two microbatches; DDP copies buffers of rank 0 before each forward."""
    rank, model = dist.get_rank(), layer()
    ddp = DistributedDataParallel(model)
    for seed in (0, 1):
        y, _ = ddp(tokens(10 * rank + seed))
        y.sum().backward()
    mine = model.router.load.tolist()
    total = take_loads(model, group=dist.group.WORLD)["router"].tolist()
    return mine, total


def test_ddp_leaves_each_rank_its_own_counts() -> None:
    results = run_distributed(under_ddp, world_size=2)
    for rank, (mine, total) in enumerate(results):
        xs = [tokens(10 * rank + seed) for seed in (0, 1)]
        assert mine == expected_load(layer(), *xs).tolist()
        everything = [tokens(seed) for seed in (0, 1, 10, 11)]
        assert total == expected_load(layer(), *everything).tolist()
