"""Overlapped exchanges give the bits of synchronous ones, whatever happens in between."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from context_block import (
    BNSD,
    BSHD,
    HEADS,
    SIZE,
    Block,
    Case,
    Projection,
    Step,
    crosswise,
    gradients,
    hidden,
    interleaved,
    once,
    overlapped,
    same,
    since,
    synchronous,
    twice,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hp_context import (
    AsyncContextParallel,
    Attention,
    ContextParallel,
    Fallback,
    OverlapCounts,
    head_to_seq,
)
from hp_context.checks import Dims
from hp_context.methods import in_flight
from hp_platform import Pending
from hp_platform.testing import run_distributed, run_in_threads

pytestmark = pytest.mark.usefixtures("one_thread")


CASES: dict[str, tuple[Case, Step, tuple[int, int, dict[Fallback, int]]]] = {
    "plain": (Case(), once, (3, 3, {})),
    "rope": (Case("rope"), once, (3, 1, {Fallback.REPLACED: 2})),
    "second consumer": (Case("second consumer"), once, (3, 3, {})),
    "core non-reentrant": (
        Case(recompute="core non-reentrant"),
        once,
        (3, 3, {Fallback.TAKEN: 3}),
    ),
    "core reentrant": (Case(recompute="core reentrant"), once, (3, 3, {Fallback.REPLACED: 3})),
    "block non-reentrant": (Case(recompute="block non-reentrant"), once, (6, 6, {})),
    "block reentrant": (Case(recompute="block reentrant"), once, (6, 6, {})),
    "two forwards": (Case(), twice, (6, 6, {})),
    "interleaved": (Case(), interleaved, (6, 6, {})),
    "crosswise": (Case(), crosswise, (6, 6, {})),
    "written in place": (Case("written"), once, (3, 2, {Fallback.WRITTEN: 1})),
    "gradient begun": (Case("begun"), once, (4, 2, {Fallback.REDIRECTED: 1})),
}


@pytest.mark.parametrize("kv_heads", [HEADS, 1], ids=["", "shared heads"])
@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_the_synchronous_exchange(name: str, kv_heads: int) -> None:
    case, step, expected = CASES[name]
    original = Block(Case(case.name, kv_heads, BSHD, case.recompute))

    def rank(group: ProcessGroup) -> tuple[bool, bool, Any]:
        reference = gradients(synchronous(original, group), group, step)
        block, parallel = overlapped(original, group)
        first = gradients(block, group, step)
        before = parallel.counts
        second = gradients(block, group, step)
        return same(first, reference), same(second, reference), since(before, parallel.counts)

    for result in run_in_threads(rank, world_size=2):
        assert result == (True, True, expected)


@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 2), (4, 4), (4, 2)])
def test_heads_first_and_more_ranks_change_nothing(ranks: int, kv_heads: int) -> None:
    original = Block(Case("second consumer", kv_heads, BNSD))

    def rank(group: ProcessGroup) -> tuple[bool, int]:
        reference = gradients(synchronous(original, group), group)
        block, parallel = overlapped(original, group)
        gradients(block, group)
        return same(gradients(block, group), reference), parallel.counts.overlapped

    assert run_in_threads(rank, world_size=ranks) == [(True, 3)] * ranks


MODES: list[tuple[dict[str, Any], int]] = [
    ({"load_balance": True}, 3),
    ({"ulysses_degree": 2}, 3),
    ({"ulysses_degree": 2, "load_balance": True}, 3),
    ({"ulysses_degree": 1}, 0),  # there are no heads to exchange
]


def overlapped_in_other_modes() -> list[tuple[bool, int]]:
    group, results = dist.group.WORLD, []
    assert group is not None
    original = Block(Case(kv_heads=2))
    for options, _ in MODES:
        reference = copy.deepcopy(original)
        ContextParallel(**options).apply(reference.core, group)
        expected = gradients(reference, group)
        block, parallel = overlapped(original, group, **options)
        gradients(block, group)
        results.append((same(gradients(block, group), expected), parallel.counts.overlapped))
    return results


@pytest.mark.usefixtures("one_thread")
def test_other_modes_overlap_what_they_exchange_of_heads() -> None:
    expected = [(True, overlaps) for _, overlaps in MODES]
    assert run_distributed(overlapped_in_other_modes, world_size=4) == [expected] * 4


class Slots:
    """The naive design: what is in flight waits in a slot for each projection.

    Attention takes whatever lies in the slots; backward puts the exchanged gradient in place of
    the one that the projection gets.
    """

    def __init__(self, block: Block, group: ProcessGroup) -> None:
        self.forward: dict[str, Pending[Tensor] | None] = {}
        self.back: dict[str, list[Pending[Tensor]]] = {letter: [] for letter in "qkv"}
        self.exchange = in_flight.Exchange(group, Dims(1, 2), None)
        for letter in "qkv":
            projection: nn.Module = getattr(block, letter)
            projection.register_forward_hook(partial(self.launch, letter))
            projection.register_full_backward_pre_hook(partial(self.replace, letter))
        block.core.register_forward_pre_hook(self.take)
        block.core.register_forward_hook(lambda _, __, out: head_to_seq(out, group=group))

    def launch(self, letter: str, _: nn.Module, __: object, x: Tensor) -> None:
        self.forward[letter] = self.exchange.launch(x.detach())

    def take(self, _: nn.Module, qkv: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        pairs = zip("qkv", qkv, strict=True)
        substitute: Any = _Substitute
        return tuple(substitute.apply(x, letter, self) for letter, x in pairs)

    def replace(self, letter: str, _: nn.Module, grads: tuple[Tensor]) -> tuple[Tensor]:
        received = self.back[letter].pop().wait()
        return (self.exchange.arrived_back(received, grads[0].shape),)


class _Substitute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, letter: str, slots: Slots) -> Tensor:
        ctx.call, ctx.shape = (letter, slots), x.shape
        pending, slots.forward[letter] = slots.forward[letter], None
        if pending is None:
            raise TypeError("the slot is empty")
        return slots.exchange.arrived(pending.wait(), x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        letter, slots = ctx.call
        slots.back[letter].append(slots.exchange.launch_back(grad, ctx.shape))
        return grad.new_zeros(ctx.shape), None, None


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("plain", "right"),
        ("rope", "wrong"),
        ("second consumer", "wrong"),
        ("core non-reentrant", "raises"),
        ("core reentrant", "raises"),
        ("block non-reentrant", "right"),
        ("block reentrant", "right"),
        ("two forwards", "right"),
        ("interleaved", "raises"),
    ],
)
def test_a_slot_for_each_projection_would_fail(name: str, outcome: str) -> None:
    case, step, _ = CASES[name]
    original = Block(case)

    def rank(group: ProcessGroup) -> str:
        reference = gradients(synchronous(original, group), group, step)
        naive = copy.deepcopy(original)
        Slots(naive, group)
        try:
            return "right" if same(gradients(naive, group, step), reference) else "wrong"
        except TypeError:
            return "raises"

    assert run_in_threads(rank, world_size=2) == [outcome] * 2


def test_overlap_switched_off_and_a_group_of_one_launch_nothing() -> None:
    original = Block(Case())

    def rank(group: ProcessGroup, overlap: bool) -> tuple[bool, OverlapCounts]:
        reference = gradients(synchronous(original, group), group)
        block, parallel = overlapped(original, group, overlap=overlap)
        gradients(block, group)
        return same(gradients(block, group), reference), parallel.counts

    nothing = (True, OverlapCounts())
    assert run_in_threads(partial(rank, overlap=False), world_size=2) == [nothing] * 2
    assert run_in_threads(partial(rank, overlap=True), world_size=1) == [nothing]


def test_a_forward_without_gradients_overlaps_but_not_in_inference_mode() -> None:
    original = Block(Case())

    def rank(group: ProcessGroup) -> list[Any]:
        block, parallel = overlapped(original, group)
        x = hidden(group).detach()
        expected, results = once(synchronous(original, group), x), []
        for mode in (torch.no_grad, torch.no_grad, torch.inference_mode):
            before = parallel.counts
            with mode():
                out = once(block, x)
            results.append((torch.equal(out, expected), since(before, parallel.counts)))
        return results

    for result in run_in_threads(rank, world_size=2):
        assert result == [
            (True, (0, 0, {Fallback.FIRST_CALL: 3})),
            (True, (3, 3, {})),
            (True, (0, 0, {Fallback.INFERENCE: 3})),
        ]


def test_a_tensor_launched_for_another_attention_is_exchanged_for_this_one() -> None:
    """One core has the sequence second, the other third; four positions, four heads."""

    def rank(group: ProcessGroup) -> tuple[bool, Any]:
        parallel = AsyncContextParallel(overlap=True)
        turned = AsyncContextParallel(seq_dim=2, head_dim=1, overlap=True)
        core = parallel.apply(Attention(), group)
        turned.apply(Attention(seq_dim=2, head_dim=1), group)
        generator = torch.Generator().manual_seed(group.rank())
        qkv = [torch.randn(1, 4, 4, SIZE, generator=generator) for _ in "qkv"]
        expected = core(*qkv)
        for key, exchange in parallel._known.items():
            turned._known[key] = replace(exchange, dims=turned.dims)
        for x in qkv:
            turned.launch(x, group)
        before = parallel.counts
        return torch.equal(core(*qkv), expected), since(before, parallel.counts)

    assert run_in_threads(rank, world_size=2) == [(True, (0, 0, {Fallback.OTHER: 3}))] * 2


class WithBias(Projection):
    """Returns its bias apart, as Megatron's linear layers do."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


def test_the_first_of_a_tuple_is_launched() -> None:
    def rank(group: ProcessGroup) -> int:
        projection = WithBias(HEADS)
        parallel = AsyncContextParallel(overlap=True)
        core = parallel.apply(Attention(), group, projection, projection, projection)
        for _ in range(2):
            core(*(projection(hidden(group))[0] for _ in "qkv"))
        return parallel.counts.overlapped

    assert run_in_threads(rank, world_size=2) == [3, 3]
