"""Experts spread over ranks give what one process gives: outputs and every gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hp_expert import ExpertParallel, GroupedExperts, MoE, TopKRouter
from hp_platform import WeightGradQueue
from hp_platform.testing import compare, run_distributed, run_in_threads

pytestmark = pytest.mark.usefixtures("one_thread")

EXPERTS, CHOICES, DIM, HIDDEN = 8, 2, 6, 10
SEQUENCES, POSITIONS = 2, 5

Tensors = dict[str, Tensor]


def build(*, dtype: torch.dtype = torch.float64, score_function: Any = "softmax") -> MoE:
    """The same layer in every rank, which may be a thread of this process."""
    router = TopKRouter(DIM, EXPERTS, CHOICES, score_function=score_function)
    moe = MoE(router, GroupedExperts(EXPERTS, DIM, HIDDEN), shared=nn.Linear(DIM, DIM)).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moe.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn / 2)
    return moe


def tokens(rank: int, *, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Every rank has other tokens, and another number of them: [B, S + rank, D]."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    shape = (SEQUENCES, POSITIONS + rank, DIM)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x[..., 0] = 1 + x[..., 0] / 10  # what `skew` gets hold of
    return x.to(dtype)


def skew(moe: MoE, routing: str) -> None:
    """Make the router send all tokens to the first two experts, if that is the routing."""
    if routing == "two experts":
        with torch.no_grad():
            moe.router.weight[:, 0] = -5
            moe.router.weight[:2, 0] = 5


def loss_of(y: Tensor, x: Tensor) -> Tensor:
    return (y * torch.cos(3 * x.detach())).sum()


def oracle(moe: MoE, x: Tensor) -> Tensor:
    """The layer written down plainly; routing by `torch.topk`, weights indexed one by one."""
    flat = x.reshape(-1, DIM)
    logits = flat @ moe.router.weight.T
    scores = logits.softmax(-1) if moe.router.score_function == "softmax" else logits.sigmoid()
    top, experts = scores.topk(CHOICES)
    top = top / top.sum(-1, keepdim=True)
    w1, w2, w3 = moe.experts.w1, moe.experts.w2, moe.experts.w3
    rows = []
    for t in range(flat.shape[0]):
        row = torch.zeros_like(flat[t])
        for k in range(CHOICES):
            e = int(experts[t, k])
            hidden = F.silu(w1[e] @ flat[t]) * (w3[e] @ flat[t])
            row = row + top[t, k] * (w2[e] @ hidden)
        rows.append(row)
    assert moe.shared is not None
    y: Tensor = torch.stack(rows).view_as(x) + moe.shared(x)
    return y


def gradients(moe: MoE, x: Tensor, y: Tensor, *, rank: int) -> Tensors:
    loss_of(y, x).backward()
    assert x.grad is not None
    found = {f"y{rank}": y.detach(), f"dx{rank}": x.grad}
    return found | {n: p.grad for n, p in moe.named_parameters() if p.grad is not None}


def together(results: list[Tensors]) -> Tensors:
    """Tensors of all ranks: experts one after the other, other parameters summed."""
    whole: Tensors = {}
    for name in {name for result in results for name in result}:
        parts = [result[name] for result in results if name in result]
        whole[name] = torch.cat(parts) if ".w" in name and "experts" in name else sum_of(parts)
    return whole


def sum_of(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)


def expected(world_size: int, routing: str, score_function: str) -> Tensors:
    moe = build(score_function=score_function)
    skew(moe, routing)
    whole: Tensors = {}
    for rank in range(world_size):
        x = tokens(rank).requires_grad_()
        whole |= gradients(moe, x, oracle(moe, x), rank=rank)
    return whole


def spread(moe: MoE, group: dist.ProcessGroup) -> MoE:
    ExpertParallel().apply(moe, group)
    return moe


def one_rank(routing: str, score_function: str) -> Tensors:
    group = dist.group.WORLD
    assert group is not None
    moe = build(score_function=score_function)
    skew(moe, routing)
    x = tokens(group.rank()).requires_grad_()
    y, _ = spread(moe, group)(x)
    return gradients(moe, x, y, rank=group.rank())


@pytest.mark.parametrize("routing", ["any", "two experts"])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_outputs_and_gradients_equal_one_process(
    world_size: int, score_function: str, routing: str
) -> None:
    results = run_distributed(one_rank, routing, score_function, world_size=world_size)
    comparison = compare(
        together(results), expected(world_size, routing, score_function), bound=1e-12
    )
    assert comparison.ok, str(comparison)


def without_tokens(group: dist.ProcessGroup) -> Tensors:
    moe = spread(build(), group)
    x = tokens(group.rank())
    if group.rank() == 0:
        x = x[:, :0]
    x.requires_grad_()
    y, _ = moe(x)
    return gradients(moe, x, y, rank=group.rank())


def test_a_rank_without_tokens_takes_part_in_both_directions() -> None:
    results = run_in_threads(without_tokens, world_size=2)
    moe = build()
    x = tokens(1).requires_grad_()
    whole = gradients(moe, x, oracle(moe, x), rank=1)
    assert results[0]["y0"].shape == results[0]["dx0"].shape == (SEQUENCES, 0, DIM)
    actual = {n: t for n, t in together(results).items() if n not in ("y0", "dx0")}
    comparison = compare(actual, whole, bound=1e-12)
    assert comparison.ok, str(comparison)


def test_experts_nobody_chose_get_gradients_of_exactly_zero() -> None:
    results = run_in_threads(two_experts, world_size=4)
    for rank in (1, 2, 3):
        for name in ("experts.w1", "experts.w2", "experts.w3"):
            assert not results[rank][name].any()
    assert all(results[0][name].any() for name in ("experts.w1", "experts.w2", "experts.w3"))


def two_experts(group: dist.ProcessGroup) -> Tensors:
    moe = build()
    skew(moe, "two experts")
    x = tokens(group.rank()).requires_grad_()
    y, _ = spread(moe, group)(x)
    return gradients(moe, x, y, rank=group.rank())


def sequentially(moe: MoE, xs: list[Tensor]) -> list[Tensor]:
    return [moe(x)[0] for x in xs]


def interleaved(moe: MoE, xs: list[Tensor]) -> list[Tensor]:
    """Dispatch A, dispatch B, compute and combine A, then B."""
    dispatcher, sent = moe.experts.dispatcher, []
    for x in xs:
        flat = x.reshape(-1, DIM)
        routing = moe.router(flat)
        rows, state = dispatcher.prepare(flat, routing.experts, routing.weights)
        sent.append(dispatcher.launch_dispatch(rows, state))
    batches = [dispatcher.finish_dispatch(rows, state) for rows, state in sent]
    outs = [moe.experts(batch) for batch in batches]
    pairs = list(zip(outs, [state for _, state in sent], strict=True))
    back = [dispatcher.launch_combine(out, state) for out, state in pairs]
    assert moe.shared is not None
    return [
        dispatcher.finish_combine(rows, state).view_as(x) + moe.shared(x)
        for rows, (_, state), x in zip(back, pairs, xs, strict=True)
    ]


def recomputed(moe: MoE, xs: list[Tensor], *, reentrant: bool) -> list[Tensor]:
    run: Callable[[Tensor], Tensor] = lambda x: moe(x)[0]  # noqa: E731
    return [checkpoint(run, x, use_reentrant=reentrant) for x in xs]


def reentrant(moe: MoE, xs: list[Tensor]) -> list[Tensor]:
    return recomputed(moe, xs, reentrant=True)


def non_reentrant(moe: MoE, xs: list[Tensor]) -> list[Tensor]:
    return recomputed(moe, xs, reentrant=False)


WAYS = [interleaved, reentrant, non_reentrant, sequentially]


def two_microbatches(
    group: dist.ProcessGroup, run: Callable[[MoE, list[Tensor]], list[Tensor]]
) -> list[Tensor]:
    moe = spread(build(dtype=torch.float32), group)
    xs = [tokens(group.rank(), seed=s, dtype=torch.float32).requires_grad_() for s in (1, 2)]
    ys = run(moe, xs)
    for x, y in zip(xs, ys, strict=True):
        loss_of(y, x).backward()
    found = [*ys, *(x.grad for x in xs), *(p.grad for p in moe.parameters())]
    assert all(t is not None for t in found)
    return [t.detach() for t in found if t is not None]


@pytest.mark.parametrize("way", WAYS)
def test_bits_do_not_depend_on_interleaving_nor_recomputation(
    way: Callable[[MoE, list[Tensor]], list[Tensor]],
) -> None:
    actual = run_in_threads(lambda group: two_microbatches(group, way), world_size=2)
    expected = run_in_threads(lambda group: two_microbatches(group, sequentially), world_size=2)
    for mine, theirs in zip(actual, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def deferred(
    group: dist.ProcessGroup, run: Callable[[MoE, list[Tensor]], list[Tensor]], *, defer: bool
) -> list[Tensor]:
    moe = spread(build(dtype=torch.float32), group)
    queue = WeightGradQueue()
    xs = [tokens(group.rank(), seed=s, dtype=torch.float32).requires_grad_() for s in (1, 2)]
    ys = run(moe, xs)
    for key, (x, y) in enumerate(zip(xs, ys, strict=True)):
        if not defer:
            loss_of(y, x).backward()
            continue
        with queue.defer(key):
            loss_of(y, x).backward()
        assert x.grad is not None
    if defer:
        assert moe.experts.w1.grad is None
        assert [queue.flush(key) for key in (0, 1)] == [4, 4]  # router, w1, w2, w3
    grads = [t.grad for t in (*xs, *moe.parameters())]
    return [grad for grad in grads if grad is not None]


@pytest.mark.parametrize("way", WAYS)
def test_weight_gradients_can_come_after_the_input_gradients_have_left(
    way: Callable[[MoE, list[Tensor]], list[Tensor]],
) -> None:
    actual = run_in_threads(lambda group: deferred(group, way, defer=True), world_size=2)
    expected = run_in_threads(
        lambda group: deferred(group, sequentially, defer=False), world_size=2
    )
    for mine, theirs in zip(actual, expected, strict=True):
        assert len(mine) == len(theirs)
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
