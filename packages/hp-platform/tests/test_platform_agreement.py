"""All ranks raise, or none."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hp_platform import PeerError, agree, all_to_all, initialize, new_group, on_one_rank
from hp_platform.testing import run_distributed, run_in_threads


def _outcome(error: BaseException | None, group: ProcessGroup) -> BaseException | None:
    try:
        agree(error, group=group, where="the exchange")
    except (PeerError, ValueError, KeyboardInterrupt) as raised:
        return raised
    return None


def test_without_an_error_all_go_on() -> None:
    def rank_main(group: ProcessGroup) -> bool:
        return _outcome(None, group) is None

    assert run_in_threads(rank_main, world_size=3) == [True] * 3


def test_one_error_is_raised_by_all_ranks() -> None:
    own = ValueError("capacity (0) must be positive")

    def rank_main(group: ProcessGroup) -> BaseException | None:
        return _outcome(own if group.rank() == 1 else None, group)

    first, second, third = run_in_threads(rank_main, world_size=3)
    assert second is own
    for peer in (first, third):
        assert isinstance(peer, PeerError)
        assert peer.rank == 1
        expected = "rank 1 failed before the exchange: ValueError: capacity (0) must be positive"
        assert str(peer) == expected


def test_several_errors_are_all_listed() -> None:
    def rank_main(group: ProcessGroup) -> BaseException | None:
        errors = {0: ValueError("first"), 2: KeyboardInterrupt()}
        return _outcome(errors.get(group.rank()), group)

    first, second, third = run_in_threads(rank_main, world_size=3)
    assert isinstance(first, ValueError)
    assert first.__notes__ == ["rank 2 failed as well: KeyboardInterrupt"]
    assert isinstance(second, PeerError)
    assert second.rank == 0
    assert str(second) == (
        "rank 0 failed before the exchange: ValueError: first; "
        "rank 2 failed before the exchange: KeyboardInterrupt"
    )
    assert isinstance(third, KeyboardInterrupt)


def test_the_group_is_still_in_step_after_a_failure() -> None:
    def rank_main(group: ProcessGroup) -> list[float]:
        _outcome(ValueError("x") if group.rank() == 0 else None, group)
        return all_to_all(torch.full((2,), float(group.rank())), group=group).tolist()

    assert run_in_threads(rank_main, world_size=2) == [[0.0, 1.0]] * 2


def test_very_long_and_odd_messages_survive() -> None:
    message = "\N{SNOWMAN}" * 100_000

    def rank_main(group: ProcessGroup) -> BaseException | None:
        return _outcome(ValueError(message) if group.rank() == 0 else None, group)

    _, peer = run_in_threads(rank_main, world_size=2)
    assert str(peer).startswith("rank 0 failed before the exchange: ValueError: \N{SNOWMAN}")
    assert len(str(peer)) < 5000


def _global_rank_in_a_subgroup() -> int | None:
    group = new_group([[1, 2]], name="control")
    if group is None:
        return None
    error = ValueError("bad") if dist.get_rank() == 2 else None
    raised = _outcome(error, group)
    return raised.rank if isinstance(raised, PeerError) else None


def test_ranks_are_named_as_in_the_world() -> None:
    assert run_distributed(_global_rank_in_a_subgroup, world_size=3) == [None, 2, None]


def _dies_before_agreeing() -> None:
    runtime = initialize()
    if runtime.info.rank == 1:
        os._exit(0)
    notes: list[str] = []
    try:
        agree(group=runtime.control, where="saving")
    except RuntimeError as lost:
        notes += lost.__notes__
    own = ValueError("own")
    with pytest.raises(ValueError, match="own") as caught:
        agree(own, group=runtime.control)
    raise SystemExit("; ".join([*notes, *caught.value.__notes__]))


def test_a_lost_rank_ends_the_agreement_and_keeps_the_own_error() -> None:
    with pytest.raises(RuntimeError, match="rank 1 of 2 died") as caught:
        run_distributed(_dies_before_agreeing, world_size=2, timeout=20)
    own = str(caught.value).splitlines()[-1]
    assert own.startswith("rank 0 of 2 raised SystemExit: a rank was lost while all were to agree")
    assert "before saving; the other ranks could not be told: " in own


def _made_once() -> tuple[list[int], str]:
    group = new_group([range(dist.get_world_size())], name="control", backend="gloo")
    assert group is not None
    made = on_one_rank(lambda: [dist.get_rank(), os.getpid()], of=list[int], group=group)

    def fail() -> int:
        raise ValueError(f"memory ({dist.get_rank()}) must be >= 1")

    try:
        on_one_rank(fail, of=int, group=group, where="the search")
    except (ValueError, PeerError) as error:
        return made, f"{type(error).__name__}: {error}"
    return made, ""


def test_one_rank_makes_what_all_have() -> None:
    made, failures = zip(*run_distributed(_made_once, world_size=3), strict=True)
    assert made[0][0] == 0
    assert made == (made[0],) * 3
    assert failures[0] == "ValueError: memory (0) must be >= 1"
    for failure in failures[1:]:
        assert failure.startswith("PeerError: rank 0 failed")
        assert "the search" in failure
        assert "memory (0) must be >= 1" in failure
