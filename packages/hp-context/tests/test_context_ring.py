"""What travels round a ring, when, how often and how far; and what is left after a failure."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from hp_context import (
    Attention,
    Causal,
    ContextParallel,
    Contiguous,
    Documents,
    Full,
    HeadTail,
    Mask,
    PositionMask,
    SequenceLayout,
    SlidingWindow,
    mask_tensor,
    masked_attention,
    shard_sequence,
    unshard_sequence,
)
from hp_context.attention.spread import length
from hp_context.methods.ring import routes
from hp_platform.collectives.pending import release_completed
from hp_platform.testing import run_distributed, watch_operators

pytestmark = pytest.mark.usefixtures("one_thread")

RANKS, SEQ = 4, 32
PART = SEQ // RANKS
LAYOUTS = [Contiguous(), HeadTail()]
known = st.one_of(
    st.sampled_from([Full(), Causal(), Causal() & Documents((1, 12, 3, 16))]),
    st.sampled_from([Documents((32,)), Documents((5, 27)), Documents((20, 3, 9))]),
    st.builds(SlidingWindow, st.integers(0, 20), st.integers(0, 6)),
)


@dataclass(frozen=True)
class Way:
    """Rows of the keys of a rank that travel, and how many ranks far."""

    rows: int
    hops: int


def ways(mask: Mask, layout: SequenceLayout) -> list[Way]:
    """The same as `routes`, by looking at each pair of positions."""
    allowed = mask_tensor(mask, SEQ)
    held = [[p for run in runs for p in run] for runs in layout.runs(SEQ, RANKS)]
    result = []
    for source in range(RANKS):
        seen = [allowed[held[(source + t) % RANKS]][:, held[source]].any(0) for t in range(RANKS)]
        rows = torch.stack(seen[1:]).any(0).sum()
        hops = max((t for t in range(1, RANKS) if seen[t].any()), default=0)
        result.append(Way(int(rows), hops))
    return result


@settings(deadline=None)
@given(known, st.sampled_from(LAYOUTS))
def test_keys_go_as_far_as_they_are_seen_and_those_alone(
    mask: Mask, layout: SequenceLayout
) -> None:
    planned = routes(layout.runs(SEQ, RANKS), mask)
    assert [Way(length(rows), hops) for rows, hops in planned] == ways(mask, layout)


def test_an_unknown_mask_sends_everything_all_the_way() -> None:
    mask = PositionMask(lambda query, key: query == key)
    for rows, hops in routes(Contiguous().runs(SEQ, RANKS), mask):
        assert (length(rows), hops) == (PART, RANKS - 1)


def test_a_window_bounds_the_way() -> None:
    window = SlidingWindow(PART + 1)
    planned = routes(Contiguous().runs(SEQ, RANKS), window)
    assert [hops for _, hops in planned] == [2, 2, 1, 0]
    near = routes(Contiguous().runs(SEQ, RANKS), SlidingWindow(3))
    assert [(rows, hops) for rows, hops in near[:2]] == [((range(5, 8),), 1), ((range(13, 16),), 1)]


def world() -> ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def inputs(layout: SequenceLayout, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """This rank's part of q, k, v and of the gradient of the output."""
    return [shard_sequence(x, world(), layout=layout).to(dtype) for x in whole()]


def whole() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(4, 8), (2, 8), (2, 6), (4, 6)]
    return [
        torch.randn(1, SEQ, *shape, dtype=torch.float64, generator=generator) for shape in shapes
    ]


Calls = list[tuple[str, int]]


def sent(step: Callable[[], object]) -> tuple[Counter[str], int]:
    """Run `step`; return the operations of the group, and bytes of the messages."""
    calls: Calls = []

    def see(name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        del kwargs
        namespace, operator = name.split("::")
        if "c10d" in namespace:
            tensors = args[0] if operator == "send" else []
            assert isinstance(tensors, list)
            calls.append((operator, sum(x.nbytes for x in tensors)))

    with watch_operators(see):
        step()
    return Counter(name for name, _ in calls), sum(size for _, size in calls)


def counted(
    cases: list[tuple[Mask, SequenceLayout]],
) -> list[list[tuple[Counter[str], int]]]:
    results = []
    for mask, layout in cases:
        core = ContextParallel(ring=True, layout=layout).apply(Attention(mask), world())
        q, k, v, grad = inputs(layout, torch.bfloat16)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        core(*leaves)  # ranks compare notes
        outs: list[Tensor] = []
        forward = sent(lambda: outs.append(core(*leaves)))  # noqa: B023  # runs at once
        backward = sent(lambda: torch.autograd.grad(outs, leaves, [grad]))  # noqa: B023
        results.append([forward, backward])
    return results


def expected(rank: int, mask: Mask, layout: SequenceLayout) -> list[tuple[Counter[str], int]]:
    """Messages and bytes of one rank, of heads 2, sizes 8 and 6, keys in 2 bytes, sums in 4."""
    keys = [way.rows for t, way in passing(rank, mask, layout) if way.hops > t]
    sums = [way.rows for t, way in passing(rank, mask, layout) if way.hops >= t > 0]
    comes = [way for t, way in passing(rank, mask, layout) if way.hops >= t > 0]
    back = [way for t, way in passing(rank, mask, layout) if way.hops >= t > 1]
    home = ways(mask, layout)[rank].hops > 0
    forward = Counter({"send": len(keys), "recv_": len(comes)})
    both = Counter({"send": len(keys) + len(sums), "recv_": len(comes) + len(back) + home})
    row = 2 * (8 + 6)
    return [
        (+forward, 2 * row * sum(keys)),
        (+both, 2 * row * sum(keys) + 4 * row * sum(sums)),
    ]


def passing(rank: int, mask: Mask, layout: SequenceLayout) -> list[tuple[int, Way]]:
    """What is at a rank in each step, if it goes so far."""
    return [(t, ways(mask, layout)[(rank - t) % RANKS]) for t in range(RANKS)]


def test_messages_and_bytes_are_those_of_the_journeys() -> None:
    masks = [Full(), Causal(), SlidingWindow(3), SlidingWindow(9, 2), Documents((8, 3, 5, 16))]
    cases: list[tuple[Mask, SequenceLayout]] = [(m, layout) for m in masks for layout in LAYOUTS]
    for rank, results in enumerate(run_distributed(counted, cases, world_size=RANKS)):
        for (mask, layout), result in zip(cases, results, strict=True):
            assert result == expected(rank, mask, layout), (rank, mask, layout)


def test_all_keys_and_all_sums_of_a_full_mask_go_round_once() -> None:
    part = PART * 2 * (8 + 6)
    cases: list[tuple[Mask, SequenceLayout]] = [(Full(), Contiguous())]
    for ((forward, backward),) in run_distributed(counted, cases, world_size=RANKS):
        assert forward == ({"send": 3, "recv_": 3}, 3 * part * 2)
        assert backward == ({"send": 6, "recv_": 6}, 3 * part * 2 + 3 * part * 4)


def test_documents_that_end_with_the_parts_send_nothing() -> None:
    cases: list[tuple[Mask, SequenceLayout]] = [(Documents((PART,) * RANKS), Contiguous())]
    for ((forward, backward),) in run_distributed(counted, cases, world_size=RANKS):
        assert forward == backward == ({}, 0)


class Order:
    """Records when a block is computed; sees all."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        self.events.append("block")
        return (query >= 0) & (key >= 0)


def order() -> tuple[list[str], list[str]]:
    """What a rank does in forward and in backward, in order."""
    events: list[str] = []
    core = ContextParallel(ring=True).apply(Attention(PositionMask(Order(events))), world())
    q, k, v, grad = inputs(Contiguous())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    core(*leaves)
    results = []

    def see(name: str, *_: object) -> None:
        if name == "c10d::send":
            events.append("send")

    outs: list[Tensor] = []
    for step in (
        lambda: outs.append(core(*leaves)),
        lambda: torch.autograd.grad(outs, leaves, [grad]),
    ):
        events.clear()
        with watch_operators(see):
            step()
        results.append(list(events))
    return results[0], results[1]


def test_the_next_keys_and_the_last_sums_are_in_flight_while_a_block_is_computed() -> None:
    for forward, backward in run_distributed(order, world_size=RANKS):
        assert forward == ["send", "block"] * 3 + ["block"]
        keys, sums = ["send"], ["send"]
        first = [*keys, "block"]
        between = [*keys, "block", *sums]
        assert backward == [*first, *between, *between, "block", *sums]


class Trap:
    """A mask function that fails at one of its calls."""

    def __init__(self) -> None:
        self.left = -1

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise ArithmeticError("this block cannot be computed")
        return query >= key


def after_failures() -> list[tuple[int, float]]:
    """Fail in each block in turn; what is in flight then, and how wrong the next call is."""
    trap = Trap()
    mask = PositionMask(trap)
    core = ContextParallel(ring=True).apply(Attention(mask), world())
    q, k, v, grad = inputs(Contiguous())
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step() -> list[Tensor]:
        out = core(*leaves)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    good = step()
    trap.left = 0
    step()
    num_blocks = -trap.left
    results = []
    for number in range(1, num_blocks + 1):
        trap.left = number
        with pytest.raises(ArithmeticError, match="cannot be computed"):
            step()
        again = step()
        wrong = max(float((a - b).abs().max()) for a, b in zip(again, good, strict=True))
        results.append((release_completed(), wrong))
    return results


def test_an_exception_in_any_block_leaves_nothing_in_flight() -> None:
    for results in run_distributed(after_failures, world_size=4):
        assert len(results) == 2 * RANKS  # forward and backward
        assert set(results) == {(0, 0.0)}


def test_a_rank_with_a_wrong_shape_stops_all() -> None:
    for message in run_distributed(wrong_shape, world_size=4):
        assert message in {
            "heads of k (3) must divide heads of q (4)",
            "rank 1 failed before attention: ValueError: heads of k (3) must divide heads of q (4)",
        }


def wrong_shape() -> str:
    core = ContextParallel(ring=True).apply(Attention(Causal()), world())
    q, k, v, _ = inputs(Contiguous())
    if world().rank() == 1:
        k, v = (x[:, :, [0, 1, 1]] for x in (k, v))
    with pytest.raises((ValueError, RuntimeError)) as caught:
        core(q, k, v)
    return str(caught.value)


def over_mesh() -> float:
    """A ring of the outer axis of a mesh, heads shared along the inner one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "heads"))
    parallel = ContextParallel(2, ring=True, load_balance=True)
    core = parallel.apply(Attention(Causal()), mesh)
    q, k, v, _ = inputs(HeadTail())
    expected = masked_attention(*whole()[:3], mask=Causal())
    return float(
        (unshard_sequence(core(q, k, v), world(), layout=HeadTail()) - expected).abs().max()
    )


def test_a_mesh_of_two_axes_is_a_ring_of_groups_that_share_heads() -> None:
    assert max(run_distributed(over_mesh, world_size=4)) <= 1e-12


def test_without_a_degree_a_ring_has_all_ranks_and_with_all_heads_shared_none() -> None:
    assert ContextParallel(ring=True).ulysses_degree == 1
    assert ContextParallel(4, ring=True).ulysses_degree == 4
    assert run_distributed(partial(ulysses_of, True), world_size=2) == [0.0, 0.0]


def ulysses_of(ring: bool) -> float:
    q, k, v, _ = inputs(Contiguous())
    cores = [
        ContextParallel(2, ring=way).apply(Attention(Causal()), world()) for way in (ring, False)
    ]
    first, second = (core(q, k, v) for core in cores)
    return float((first - second).abs().max())
