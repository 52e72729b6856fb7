"""Experts whose hidden dim is cut over ranks: what travels, when it is waited for, how it fails."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from hp_expert import (
    AllToAllDispatcher,
    DispatchState,
    ExpertTensorParallel,
    GroupedExperts,
    MoE,
    Permutation,
    SlicedState,
    TensorParallel,
    TensorSlicedDispatcher,
    TopKRouter,
    grad_norm,
)
from hp_expert.testing import host_reads
from hp_platform import PeerError, is_waited, new_group
from hp_platform.testing import run_distributed, run_in_threads, watch_operators

EXPERTS, CHOICES, DIM, HIDDEN, EP = 8, 3, 6, 8, 2

Groups = tuple[dist.ProcessGroup, dist.ProcessGroup]


def groups(tp: int, *, name: str = "") -> Groups:
    """The ep and tp groups of this rank in a grid of two ep ranks."""
    ep_group = new_group([[e * tp + t for e in range(EP)] for t in range(tp)], name=f"ep{name}")
    tp_group = new_group([[e * tp + t for t in range(tp)] for e in range(EP)], name=f"tp{name}")
    assert ep_group is not None
    assert tp_group is not None
    return ep_group, tp_group


def layer(dtype: torch.dtype = torch.float64, *, bias: bool = True) -> MoE:
    router = TopKRouter(DIM, EXPERTS, CHOICES)
    moe = MoE(router, GroupedExperts(EXPERTS, DIM, HIDDEN, bias=bias)).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return moe


def tokens(seed: int, count: int = 7, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, DIM, generator=generator, dtype=dtype).requires_grad_()


def loss_of(y: Tensor, x: Tensor) -> Tensor:
    return (y * torch.cos(3 * x.detach())).sum()


class Sent:
    """Counts rows that exchanges over a group send, to other ranks and to this one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.num_rows, self.all_reduces = group, 0, 0

    def see(self, name: str, args: Any, kwargs: Any) -> None:
        del kwargs
        exchanged = name == "_c10d_functional::all_to_all_single"
        if exchanged and args[3] == self.group.group_name and args[0].shape[-1:] == (DIM,):
            self.num_rows += args[0].shape[0]
        self.all_reduces += "allreduce" in name or "all_reduce" in name


def rows_over_ep(sliced: bool) -> tuple[int, int]:
    """Rows sent by this rank with the tokens sliced, and by one that has all of them."""
    ep, tp = groups(2)
    counts = []
    for with_tp in (True, False):
        moe, x, sent = layer(), tokens(ep.rank(), 31), Sent(ep)
        if sliced:
            x = x.detach().split((16, 15))[tp.rank()].requires_grad_()
        if with_tp:
            style = ExpertTensorParallel(deduplicate=False, sliced=sliced)
            style.apply(moe, (ep, tp))
        else:
            moe.experts = GroupedExperts(EXPERTS // EP, DIM, HIDDEN, dtype=torch.float64)
            moe.experts.dispatcher = AllToAllDispatcher(ep, EXPERTS, deduplicate=False)
        with watch_operators(sent.see):
            y, _ = moe(x)
            loss_of(y, x).backward()
        counts.append(sent.num_rows)
    return counts[0], counts[1]


def test_each_rank_sends_its_share_of_the_tokens_and_all_of_them_none_twice() -> None:
    found = run_distributed(rows_over_ep, False, world_size=4)
    for first in (0, 2):  # the ranks of one tp group
        parts, wholes = zip(*found[first : first + 2], strict=True)
        assert wholes[0] == wholes[1] > 0
        # An exchange back sends what arrived, which is not exactly half of what left.
        assert all(abs(part - wholes[0] / 2) < 0.1 * wholes[0] for part in parts)
    assert sum(part for part, _ in found) == sum(whole for _, whole in found) / 2


def test_tokens_that_are_sliced_already_travel_as_they_are() -> None:
    assert all(part == whole for part, whole in run_distributed(rows_over_ep, True, world_size=4))


def reads_and_sums(style: str) -> tuple[int, int, int]:
    ep, tp = groups(2)
    moe, x = layer(), tokens(ep.rank())
    if style == "tp":
        TensorParallel().apply(moe, tp)
    else:
        ExpertTensorParallel().apply(moe, (ep, tp))
    forward, backward = Sent(ep), Sent(ep)
    with host_reads() as reads:
        with watch_operators(forward.see):
            y, _ = moe(x)
        with watch_operators(backward.see):
            y.sum().backward()
    return len(reads), forward.all_reduces, backward.all_reduces


def test_a_layer_reads_the_host_once() -> None:
    for style in ("tp", "ep and tp"):
        assert {r for r, *_ in run_distributed(reads_and_sums, style, world_size=4)} == {1}


def test_tensor_parallel_experts_sum_once_in_each_direction() -> None:
    assert set(run_distributed(reads_and_sums, "tp", world_size=4)) == {(1, 1, 1)}


def few_tokens() -> list[float]:
    """Four tp ranks share 0 .. 5 tokens, as many on one ep rank as are lacking on the other."""
    ep, tp = groups(4)
    errors = []
    for count in range(6):
        moe = layer()
        ExpertTensorParallel(deduplicate=bool(count % 2)).apply(moe, (ep, tp))
        x = tokens(ep.rank(), count if ep.rank() else 5 - count)
        expected = x.detach().clone().requires_grad_()
        (y, _), (whole, _) = moe(x), layer()(expected)
        loss_of(y, x).backward()
        loss_of(whole, expected).backward()
        assert x.grad is not None
        assert expected.grad is not None
        assert y.shape == whole.shape == x.grad.shape
        pairs = ((y, whole), (x.grad, expected.grad))
        errors += [float((a - b).detach().abs().max()) for a, b in pairs if a.numel()]
    return errors


def test_there_may_be_fewer_tokens_than_ranks() -> None:
    assert max(max(errors) for errors in run_distributed(few_tokens, world_size=8)) < 1e-11


def own_tokens() -> float:
    """The loss is over the tokens of all ranks, as in one process."""
    ep, tp = groups(2)
    moe, whole = layer(), layer()
    ExpertTensorParallel(sliced=True).apply(moe, (ep, tp))
    everyone = [tokens(rank, 3 + 2 * rank).detach() for rank in range(4)]
    x = everyone[dist.get_rank()].clone().requires_grad_()
    y, _ = moe(x)
    loss_of(y, x).backward()
    all_x = torch.cat(everyone).requires_grad_()
    all_y, _ = whole(all_x)
    loss_of(all_y, all_x).backward()
    sizes = [len(part) for part in everyone]
    router = moe.router.weight.grad
    assert router is not None
    dist.all_reduce(router)
    w1, b2 = whole.experts.w1.grad, whole.experts.b2
    assert w1 is not None
    assert b2 is not None
    assert b2.grad is not None
    assert moe.experts.b2 is not None
    pairs = [
        (y, all_y.split(sizes)[dist.get_rank()]),
        (x.grad, all_x.grad.split(sizes)[dist.get_rank()] if all_x.grad is not None else None),
        (router, whole.router.weight.grad),
        (moe.experts.w1.grad, w1.chunk(EP)[ep.rank()].chunk(2, 1)[tp.rank()]),
        # A copy, whose gradient each has whole: nobody is to sum it over tp.
        (moe.experts.b2.grad, b2.grad.chunk(EP)[ep.rank()]),
        (grad_norm(moe.experts), grad_norm(whole.experts)),
    ]
    return max(float((a - b).detach().abs().max()) for a, b in pairs if a is not None)


def test_ranks_may_have_other_slices_of_the_tokens_from_the_start() -> None:
    assert max(run_distributed(own_tokens, world_size=4)) < 1e-11


def sequentially(moe: MoE, xs: list[Tensor]) -> list[Tensor]:
    return [moe(x)[0] for x in xs]


def interleaved(moe: MoE, xs: list[Tensor]) -> list[Tensor]:
    """Dispatch A, dispatch B, compute and combine A, then B."""
    dispatcher, sent = moe.experts.dispatcher, []
    for x in xs:
        routing = moe.router(x)
        rows, state = dispatcher.prepare(x, routing.experts, routing.weights)
        sent.append(dispatcher.launch_dispatch(rows, state))
    outs = [moe.experts(dispatcher.finish_dispatch(*pair)) for pair in sent]
    states = [state for _, state in sent]
    back = [dispatcher.launch_combine(*pair) for pair in zip(outs, states, strict=True)]
    return [dispatcher.finish_combine(*pair) for pair in zip(back, states, strict=True)]


def recomputed(moe: MoE, xs: list[Tensor]) -> list[Tensor]:
    return [checkpoint(lambda x: moe(x)[0], x, use_reentrant=False) for x in xs]


def in_threads(moe: MoE, xs: list[Tensor]) -> list[Tensor]:
    """Each microbatch in a thread, through groups of its own."""
    ys: list[Tensor | None] = [None for _ in xs]
    dispatchers = []
    for i in range(len(xs)):
        ep, tp = groups(2, name=f"thread{i}")
        dispatchers.append(TensorSlicedDispatcher(AllToAllDispatcher(ep, EXPERTS), tp))

    def work(i: int) -> None:
        routing, dispatcher = moe.router(xs[i]), dispatchers[i]
        rows, state = dispatcher.prepare(xs[i], routing.experts, routing.weights)
        batch = dispatcher.finish_dispatch(*dispatcher.launch_dispatch(rows, state))
        ys[i] = dispatcher.finish_combine(
            dispatcher.launch_combine(moe.experts(batch), state), state
        )

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [y for y in ys if y is not None]


def two_microbatches(ways: list[Callable[[MoE, list[Tensor]], list[Tensor]]]) -> list[list[Tensor]]:
    ep, tp = groups(2)
    results = []
    for way in ways:
        moe = layer(torch.float32)
        ExpertTensorParallel().apply(moe, (ep, tp))
        xs = [tokens(2 * s + ep.rank(), 9 + s, torch.float32) for s in (1, 2)]
        for y, x in zip(way(moe, xs), xs, strict=True):
            loss_of(y, x).backward()
        results.append([t.grad for t in (*xs, *moe.parameters()) if t.grad is not None])
    return results


def test_bits_do_not_depend_on_interleaving_recomputation_or_threads() -> None:
    ways = [sequentially, sequentially, interleaved, recomputed, in_threads]
    for expected, *others in run_distributed(two_microbatches, ways, world_size=4):
        assert len(expected) == 2 + 7
        for actual in others:
            assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def unwaited() -> list[bool]:
    """Tell whether something has waited for results of launches, and for gradients of them."""
    ep, tp = groups(2)
    moe, x = layer(), tokens(ep.rank())
    ExpertTensorParallel().apply(moe, (ep, tp))
    dispatcher, routing, waited = moe.experts.dispatcher, moe.router(x), []
    rows, state = dispatcher.prepare(x, routing.experts, routing.weights)
    rows.register_hook(lambda gradient: waited.append(is_waited(gradient)))
    rows, state = dispatcher.launch_dispatch(rows, state)
    waited.append(is_waited(rows))
    out = moe.experts(dispatcher.finish_dispatch(rows, state))
    out.register_hook(lambda gradient: waited.append(is_waited(gradient)))
    rows = dispatcher.launch_combine(out, state)
    waited.append(is_waited(rows))
    dispatcher.finish_combine(rows, state).sum().backward()
    return waited


def test_nobody_waits_inside_a_launch_for_what_it_launched() -> None:
    assert run_distributed(unwaited, world_size=4) == [[False] * 4] * 4


def changed_in_place(style: str) -> None:
    ep, tp = groups(2)
    moe, x, same = layer(), tokens(ep.rank()), tokens(ep.rank())
    if style == "tp":
        TensorParallel().apply(moe, tp)
    else:
        ExpertTensorParallel().apply(moe, (ep, tp))
    y, _ = moe(x)
    expected, _ = layer()(same)
    (y.mul_(2).square().sum() + (2 * expected).square().sum()).backward()
    assert x.grad is not None
    assert same.grad is not None
    assert torch.allclose(x.grad, same.grad, rtol=1e-11)


@pytest.mark.parametrize("style", ["tp", "ep and tp"])
def test_outputs_may_be_changed_in_place(style: str) -> None:
    run_distributed(changed_in_place, style, world_size=4)


def test_what_returns_under_autocast_is_as_narrow_as_what_was_computed() -> None:
    """On CUDA, where it widens sums; a tensor that has no memory is enough to see it."""

    def rank_main(group: dist.ProcessGroup) -> torch.dtype:
        torch.set_autocast_enabled("cuda", True)  # in this thread
        with FakeTensorMode():
            dispatcher = TensorSlicedDispatcher(AllToAllDispatcher(group, EXPERTS), group)
            none = torch.empty(0, dtype=torch.int64, device="cuda")
            rows = Permutation(none, none, none)
            mine = DispatchState(rows, None, None, (), none, input_splits=(4,), output_splits=(4,))
            state = SlicedState(mine, (4,), (4,), (), none)
            y = torch.empty(4, DIM, dtype=torch.bfloat16, device="cuda")
            return dispatcher.launch_combine(y, state).dtype

    assert run_in_threads(rank_main, world_size=1) == [torch.bfloat16]


def wrong_on_one_rank(style: str) -> str:
    ep, tp = groups(2)
    moe, rank = layer(), dist.get_rank()
    if style == "tp":
        TensorParallel().apply(moe, tp)
    else:
        ExpertTensorParallel().apply(moe, (ep, tp))
    x = tokens(ep.rank()).detach()
    routing = moe.router(x)
    experts = routing.experts.clone()
    if rank % 2 == 1 and (style == "tp" or rank == 1):
        experts[-1, 0] = EXPERTS
    with pytest.raises((ValueError, PeerError)) as caught:
        moe.experts.dispatcher.prepare(x, experts, routing.weights)
    y, _ = moe(x)  # the groups can be used again
    assert torch.allclose(y, layer()(x)[0], rtol=1e-11)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("style", ["tp", "ep and tp"])
def test_wrong_input_of_one_rank_is_an_error_on_all(style: str) -> None:
    messages = run_distributed(wrong_on_one_rank, style, world_size=4, timeout=20)
    assert "experts must be in [0, num_experts (8))" in messages[1]
    # Rank 2 shares no group with rank 1, and hears of it from one that does.
    others = (messages[0], messages[2])
    assert all(m.startswith("PeerError: rank") and "experts must be in" in m for m in others)


def of_other_dtypes() -> str:
    ep, tp = groups(2)
    moe = layer()
    ExpertTensorParallel().apply(moe, (ep, tp))
    rows = tokens(ep.rank()).detach().to(torch.float32 if dist.get_rank() == 2 else torch.float64)
    with pytest.raises(ValueError, match="float32") as caught:
        moe.experts.dispatcher.prepare(rows, torch.zeros(7, 1, dtype=torch.int64))
    words = str(caught.value).split()
    return f"{words[1]} {words[words.index('that') + 3]}"


def test_ranks_that_differ_are_numbered_over_both_axes() -> None:
    found = run_distributed(of_other_dtypes, world_size=4, timeout=20)
    assert found == ["0: 2", "1: 2", "2: 0", "3: 2"]


def other_numbers_of_tokens(style: str, more: int) -> None:
    ep, tp = groups(2)
    moe = layer()
    if style == "tp":
        TensorParallel().apply(moe, tp)
    else:
        ExpertTensorParallel().apply(moe, (ep, tp))
    differs = dist.get_rank() % 2 == 1 and (style == "tp" or ep.rank() == 1)
    there = 7 + more
    with pytest.raises(ValueError, match=rf"{there}.* must .* \(?7|\(7.*\({there}"):
        moe(tokens(0, there if differs else 7))


@pytest.mark.parametrize("more", [1, -1])
@pytest.mark.parametrize("style", ["tp", "ep and tp"])
def test_ranks_that_should_have_the_same_tokens_must(style: str, more: int) -> None:
    run_distributed(other_numbers_of_tokens, style, more, world_size=4, timeout=20)


def other_experts_for_as_many_tokens() -> None:
    _, tp = groups(2)
    moe, x = layer(), tokens(0)
    TensorParallel().apply(moe, tp)
    chosen = torch.full((len(x), 1), 2 * tp.rank())
    with pytest.raises(ValueError, match=r"rank 1 .*\(7 tokens\) must .* go to each expert"):
        moe.experts.dispatcher.prepare(x, chosen, torch.ones(len(x), 1, dtype=x.dtype))


def test_ranks_that_should_have_the_same_routing_must() -> None:
    """Outputs of other experts would be summed."""
    run_distributed(other_experts_for_as_many_tokens, world_size=4, timeout=20)
