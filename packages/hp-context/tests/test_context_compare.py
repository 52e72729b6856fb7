"""What ranks compare before they exchange: see Note [When ranks compare]."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from hp_context import (
    AsyncContextParallel,
    Attention,
    Causal,
    ContextParallel,
    Documents,
    Mask,
    PositionMask,
    SlidingWindow,
    shard_sequence,
)
from hp_context.checks import digest
from hp_platform import PeerError, initialize, new_group
from hp_platform.testing import record_exchanges, run_distributed, run_in_threads

MODES: dict[str, tuple[int, Callable[[], ContextParallel]]] = {
    "ulysses": (3, ContextParallel),
    "all-gather": (3, lambda: ContextParallel(1)),
    "ring": (3, lambda: ContextParallel(ring=True)),
    "hybrid": (4, lambda: ContextParallel(2)),
    "hybrid ring": (4, lambda: ContextParallel(2, ring=True)),
    "async": (3, lambda: AsyncContextParallel(overlap=True)),
    "async all-gather": (3, lambda: AsyncContextParallel(1, overlap=True)),
}
SEQ, HEADS = 24, 12


def _world() -> ProcessGroup:
    initialize()
    ranks = range(dist.get_world_size())
    group = new_group([ranks], name="cp", timeout=timedelta(seconds=20))
    assert group is not None
    return group


def _qkv(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, SEQ, HEADS, 4, generator=generator) for _ in range(3)]


def _attend(
    core: Attention, seed: int, mask: Mask | None, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Forward and backward of a microbatch: this rank's part of the output, and of dq."""
    q, k, v = (shard_sequence(x, group).requires_grad_() for x in _qkv(seed))
    out = core(q, k, v, attn_mask=mask)
    out.sin().sum().backward()
    assert q.grad is not None
    return out.detach(), q.grad


def _other_documents(mode: str) -> tuple[str, float]:
    """The documents of rank 1 differ in the second microbatch, as if it had read another file."""
    group = _world()
    core = MODES[mode][1]().apply(Attention(), group)
    lengths = (7, 9, 8)
    error = 0.0
    for seed, given in ((1, lengths), (3, (11, 13))):
        mine = _attend(core, seed, Causal() & Documents(given), group)
        whole = _alone(seed, given)
        parts = [shard_sequence(x, group) for x in whole]
        error = max(error, *(float((a - b).abs().max()) for a, b in zip(mine, parts, strict=True)))
    documents = Documents((4, 20) if group.rank() == 1 else (16, 8))
    with pytest.raises(ValueError, match="masks of ranks") as caught:
        _attend(core, 2, Causal() & documents, group)
    # All have raised together, so that the group still works.
    _attend(core, 1, Causal() & Documents(lengths), group)
    return str(caught.value), error


def _none_on_one(mode: str, when: str) -> str:
    """Rank 1 gives no documents where the others do, in the first or in a later microbatch."""
    group = _world()
    core = MODES[mode][1]().apply(Attention(mask=Causal()), group)
    if when == "later":
        for lengths in ((7, 9, 8), (11, 13)):
            _attend(core, 1, Causal() & Documents(lengths), group)
    mask = None if group.rank() == 1 else Causal() & Documents((16, 8))
    with pytest.raises(ValueError, match="masks of ranks") as caught:
        _attend(core, 2, mask, group)
    return str(caught.value)


@pytest.mark.parametrize("when", ["first", "later"])
@pytest.mark.parametrize("mode", ["ulysses", "all-gather", "ring", "async"])
def test_a_rank_that_gives_no_documents_is_named_by_all(mode: str, when: str) -> None:
    found = run_distributed(_none_on_one, mode, when, world_size=3, timeout=60)
    for message in found:
        assert message.startswith("masks of ranks [1] must equal those of ranks [0, 2]")


def _alone(seed: int, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    q, k, v = (x.requires_grad_() for x in _qkv(seed))
    out = Attention()(q, k, v, attn_mask=Causal() & Documents(lengths))
    out.sin().sum().backward()
    assert q.grad is not None
    return out.detach(), q.grad


@pytest.mark.parametrize("mode", MODES)
def test_documents_that_differ_in_a_later_microbatch_raise_on_every_rank(mode: str) -> None:
    world_size = MODES[mode][0]
    found = run_distributed(_other_documents, mode, world_size=world_size, timeout=90)
    others = [rank for rank in range(world_size) if rank != 1]
    for rank, (message, error) in enumerate(found):
        lengths = (4, 20) if rank == 1 else (16, 8)
        assert message.startswith(f"masks of ranks [1] must equal those of ranks {others}; on rank")
        assert f"Documents(lengths={lengths})" in message
        assert error < 1e-5


def _counts(core: Attention, group: ProcessGroup, run: Callable[..., Any]) -> tuple[int, int]:
    """All-gathers of integers in forward and in backward of a microbatch in three layers."""
    q, k, v = (shard_sequence(x, group).requires_grad_() for x in _qkv(5))
    documents = Documents((7, 9, 8))
    with record_exchanges() as forward:
        out = q
        for _ in range(3):
            out = out + run(core, out, k, v, SlidingWindow(5) & documents)
    with record_exchanges() as backward:
        out.sum().backward()
    counts = [
        sum(e.kind == "all_gather" and e.dtype == torch.int64 for e in seen)
        for seen in (forward, backward)
    ]
    return counts[0], counts[1]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("mode", ["ulysses", "all-gather", "ring"])
def test_a_microbatch_compares_once_and_not_in_each_layer_or_backward(
    mode: str, recompute: bool
) -> None:
    def run(core: Attention, *args: Any) -> Any:
        return checkpoint(core, *args, use_reentrant=False) if recompute else core(*args)

    def rank(group: ProcessGroup) -> list[tuple[int, int]]:
        core = MODES[mode][1]().apply(Attention(), group)
        _counts(core, group, run)
        return [_counts(core, group, run) for _ in range(3)]

    for counts in run_in_threads(rank, world_size=2):
        assert counts == [(1, 0)] * 3


def test_masks_of_the_model_are_compared_with_a_shape_only() -> None:
    def rank(group: ProcessGroup) -> list[int]:
        core = ContextParallel(1).apply(Attention(), group)
        qkv = [shard_sequence(x, group) for x in _qkv(5)]
        counts = []
        for mask in (Causal(), Causal(), SlidingWindow(3), SlidingWindow(4)):
            with record_exchanges() as seen:
                core(*qkv, attn_mask=mask)
            counts.append(sum(e.dtype == torch.int64 for e in seen))
        return counts

    assert run_in_threads(rank, world_size=2) == [[1, 0, 0, 0]] * 2


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        ({"mask": SlidingWindow(3)}, r"masks of ranks \[1\] must equal those of ranks \[0, 2\]"),
        ({"scale": 0.1}, r"settings of attention of ranks \[1\] must equal"),
        ({"softcap": 5.0}, r"settings of attention of ranks \[1\] must equal"),
        ({"sinks": torch.zeros(HEADS)}, r"settings of attention of ranks \[1\] must equal"),
    ],
    ids=["window", "scale", "soft cap", "sinks"],
)
@pytest.mark.parametrize("degree", [None, 1])
def test_a_layer_of_another_kind_on_one_rank_is_noticed_in_any_layer(
    degree: int | None, differs: dict[str, Any], message: str
) -> None:
    def rank(group: ProcessGroup) -> None:
        parallel = ContextParallel(degree)
        qkv = [shard_sequence(x, group) for x in _qkv(5)]
        parallel.apply(Attention(SlidingWindow(5)), group)(*qkv)
        settings = {"mask": SlidingWindow(5)} | (differs if group.rank() == 1 else {})
        core = parallel.apply(Attention(**settings), group)
        with pytest.raises(ValueError, match=message):
            core(*qkv)

    run_in_threads(rank, world_size=3)


def test_an_error_of_one_rank_in_the_first_call_with_documents_is_told_to_all() -> None:
    def rank(group: ProcessGroup) -> str:
        core = ContextParallel(1).apply(Attention(), group)
        qkv = [shard_sequence(x, group) for x in _qkv(5)]
        core(*qkv)
        bad = group.rank() == 1
        with pytest.raises(ValueError if bad else PeerError) as caught:
            core(*qkv, attn_mask=Documents((3,) if bad else (SEQ,)))
        return str(caught.value)

    said = run_in_threads(rank, world_size=3)
    wrong = "sum of Documents lengths (3) must equal the length of the whole sequence (24)"
    assert said[1] == wrong
    assert said[0] == said[2] == f"rank 1 failed before attention: ValueError: {wrong}"


@dataclass(frozen=True)
class Prefix(Mask):
    length: int

    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) | (key < self.length)


def odd(query: Tensor, key: Tensor) -> Tensor:
    return (query - key) % 2 == 0


def test_digests_tell_masks_apart_and_are_the_same_in_every_process() -> None:
    masks = [
        Causal(),
        SlidingWindow(3),
        SlidingWindow(4),
        Documents((3, 5)),
        Documents((5, 3)),
        Causal() & Documents((3, 5)),
        Documents((3, 5)) & Causal(),
        Prefix(3),
        Prefix(4),
        PositionMask(odd),
    ]
    found = [digest(mask) for mask in masks]
    assert len(set(found)) == len(masks)
    assert all(0 <= number < 2**63 for number in found)
    assert found[3] == digest(Documents((3, 5)))
    code = (
        "from hp_context import Causal, Documents; from hp_context.checks import digest; "
        "print(digest(Causal() & Documents((3, 5))))"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(said.stdout) == found[5]
