"""Two threads on one group: see Note [A group belongs to a thread] of `hp_platform.threads`."""

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_context import Attention, Causal, ContextParallel
from hp_platform import ThreadContext, initialize, new_group
from hp_platform.testing import run_distributed

KINDS: dict[str, dict[str, Any]] = {
    "ulysses": {},
    "all-gather": {"ulysses_degree": 1},
    "ring": {"ring": True},
}


def _group(name: str) -> ProcessGroup:
    initialize()
    ranks = range(dist.get_world_size())
    group = new_group([ranks], name=name, timeout=timedelta(seconds=5))
    assert group is not None
    return group


def _two_threads(kind: str, way: str) -> tuple[list[str], float]:
    """Two threads attend to sequences of two lengths, in an order that differs between ranks."""
    group = _group("first")
    parallel = ContextParallel(**KINDS[kind])
    core = parallel.apply(Attention(Causal()), group)
    other = core
    if way == "own group":
        other = ContextParallel(**KINDS[kind]).apply(Attention(Causal()), _group("second"))
    generator = torch.Generator().manual_seed(group.rank())
    short, long = (
        [torch.randn(1, seq, 4, 8, generator=generator) for _ in range(3)] for seq in (4, 64)
    )
    expected = core(*short)  # the main thread is the first to use the group
    if way == "context":
        core(*long)
    context, said = ThreadContext.capture(), list[str]()
    turns = threading.Semaphore(0), threading.Semaphore(0)

    def work() -> None:
        try:
            for _ in range(10):
                if way == "context":
                    turns[1].acquire(timeout=20)
                    with context.apply():
                        other(*long)
                    turns[0].release()
                else:
                    other(*long)
        except ValueError as error:
            said.append(str(error))

    helper = threading.Thread(target=work, name="second")
    helper.start()
    if way != "context" and group.rank() == 0:
        helper.join()  # so that here the other thread comes first
    wrong = 0.0
    for _ in range(10):
        out: Tensor = core(*short)
        if way == "context":
            turns[1].release()
            turns[0].acquire(timeout=20)
        wrong = max(wrong, float((out - expected).abs().max()))
    helper.join()
    return said, wrong


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_thread_is_refused_on_every_rank_and_the_first_goes_on(kind: str) -> None:
    for said, wrong in run_distributed(_two_threads, kind, "same group", world_size=2, timeout=60):
        assert len(said) == 1
        assert "thread (second) must be the one that used group" in said[0]
        assert wrong == 0.0


@pytest.mark.parametrize("way", ["own group", "context"])
@pytest.mark.parametrize("kind", KINDS)
def test_threads_with_groups_of_their_own_or_in_turn_are_welcome(kind: str, way: str) -> None:
    for said, wrong in run_distributed(_two_threads, kind, way, world_size=2, timeout=60):
        assert said == []
        assert wrong == 0.0
