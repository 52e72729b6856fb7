"""Operators of a thread are seen before they run, and the memory that they take is counted."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroup

from hp_platform.testing import LiveBytes, run_in_threads, watch_operators


def test_operators_of_forward_and_backward_are_seen_with_their_arguments() -> None:
    seen = []
    x = torch.ones(3, requires_grad=True)
    with watch_operators(lambda name, args, kwargs: seen.append((name, args, kwargs))):
        y = x.exp().sum()
        y.backward()
        bool(y > 0)
    names = [name for name, _, _ in seen]
    assert names[0] == "aten::exp"
    assert seen[0][1][0] is x
    assert "aten::mul.Tensor" in names  # of the backward of exp
    assert names[-1] == "aten::_local_scalar_dense"
    x.exp()
    assert len(seen) == len(names)


def test_what_it_raises_ends_the_operator() -> None:
    def refuse(name: str, args: object, kwargs: object) -> None:
        del args, kwargs
        raise RuntimeError(name)

    with watch_operators(refuse), pytest.raises(RuntimeError, match="aten::zeros"):
        torch.zeros(2)


def test_other_threads_are_not_seen_and_collectives_are() -> None:
    seen: list[str] = []

    def rank_main(group: ProcessGroup) -> None:
        x = torch.ones(2)
        if group.rank() == 0:
            with watch_operators(lambda name, *_: seen.append(name)):
                other = threading.Thread(target=torch.full, args=((2,), 1.0))
                other.start()
                other.join()
                dist.all_reduce(x, group=group)
        else:
            dist.all_reduce(x.exp(), group=group)

    run_in_threads(rank_main, world_size=2)
    assert seen == ["c10d::allreduce_"]


@pytest.mark.parametrize("fake", [False, True])
def test_live_bytes_are_those_of_tensors_made_inside(fake: bool) -> None:
    with FakeTensorMode() if fake else nullcontext():
        given = torch.ones(1000, dtype=torch.float64)
        with LiveBytes() as live:
            view = given[10:]  # of memory that was there
            assert live.now == 0
            made = (view * 2).view(-1, 10)
            assert live.now == live.peak == 990 * 8
            made.add_(1)
            copy = made.to(torch.float32)
            assert live.now == 990 * 12
            del made
            assert (live.now, live.peak) == (990 * 4, 990 * 12)
        del copy
        assert (live.now, live.peak) == (0, 990 * 12)
