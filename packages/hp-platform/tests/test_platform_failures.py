"""One failure for all: see Note [First failure] and Note [Liveness check]."""

import os
import signal
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from hp_platform import (
    FailureNote,
    FailureReport,
    PeerError,
    ThreadContext,
    _internals,
    agree,
    all_to_all,
    doing,
    failing_together,
    initialize,
    is_echo,
    mark_agreed,
    new_group,
    shutdown,
)
from hp_platform.failures.liveness import Answer, blame
from hp_platform.testing import run_distributed
from hp_platform.threads import current_place, place_of

_GROUP_SECONDS = 3.0


def _say(error: BaseException) -> str:
    return f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', []))}"


def _raise_on(rank: int, message: str) -> None:
    if dist.get_rank() == rank:
        raise ValueError(message)


def _group() -> dist.ProcessGroup:
    initialize()
    ranks = range(dist.get_world_size())
    group = new_group([ranks], name="test", timeout=timedelta(seconds=_GROUP_SECONDS))
    assert group is not None
    return group


def _step(kind: str, group: dist.ProcessGroup, *, everything: bool) -> None:
    x = torch.ones(6, 3)
    with failing_together("step 3", everything=everything):
        all_to_all(x, group=group)
        with doing("experts"):
            if dist.get_rank() == 1 and kind == "raise":
                raise ValueError("out of luck")
            if dist.get_rank() == 1 and kind == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if dist.get_rank() == 1 and kind == "sleep":
                time.sleep(2.5 * _GROUP_SECONDS)
        with doing("combine"):
            all_to_all(x, group=group)


def _fails(kind: str, everything: bool, folder: Path | None = None) -> str:
    group = _group()
    if folder is not None:
        (folder / f"process-{dist.get_rank()}").write_text(str(os.getpid()))
    try:
        _step(kind, group, everything=everything)
    except (ValueError, RuntimeError) as error:
        said = _say(error)
    else:
        said = "nothing"
    if folder is not None:
        (folder / str(dist.get_rank())).write_text(said)
        if all((folder / str(rank)).exists() for rank in (0, 2)):
            with suppress(ProcessLookupError):  # the other has ended it
                os.kill(int((folder / "process-1").read_text()), signal.SIGKILL)
    return said


@pytest.mark.parametrize("everything", [True, False])
def test_a_rank_that_raises_ends_the_others_with_its_place_and_error(everything: bool) -> None:
    said = run_distributed(_fails, "raise", everything, world_size=3, timeout=30)
    assert said[1] == "ValueError: out of luck on rank 1, step 3, experts"
    for rank in (0, 2):
        assert said[rank].startswith("PeerError: rank 1, step 3, experts: ValueError: out of luck")


def test_a_rank_that_does_not_come_is_named_with_what_it_is_doing() -> None:
    said = run_distributed(_fails, "sleep", True, world_size=3, timeout=60)
    for rank in (0, 2):
        assert said[rank].startswith("PeerError: rank 1, step 3, experts: did not come: rank ")
        assert "step 3, combine, waited in vain" in said[rank]
    assert "began on rank 1, step 3, experts: did not come" in said[1]


def test_a_rank_that_is_stopped_is_named(tmp_path: Path) -> None:
    # It never returns, so the others leave what they found in files, and then end it.
    with pytest.raises(RuntimeError, match="rank 1 of 3"):
        run_distributed(_fails, "stop", True, tmp_path, world_size=3, timeout=60)
    for rank in (0, 2):
        assert (
            (tmp_path / str(rank))
            .read_text()
            .startswith("PeerError: rank 1: is gone or stopped: it does not answer; rank ")
        )


def _other_groups_work() -> bool:
    group, other = _group(), _group()
    with pytest.raises((ValueError, PeerError)):
        _step("raise", group, everything=False)
    y = all_to_all(torch.ones(3, 1), group=other)
    return bool((y == 1).all())


def test_groups_that_were_not_used_still_work() -> None:
    assert run_distributed(_other_groups_work, world_size=3, timeout=30) == [True] * 3


def _wait_elsewhere() -> str:
    group, other = _group(), _group()
    try:
        with failing_together("step 1", everything=True):
            _raise_on(0, "alone")
            # Rank 2 waits for rank 1, and rank 1 for somebody who never comes.
            pair = other if dist.get_rank() == 2 else group
            dist.recv(torch.ones(1), src=1 if dist.get_rank() == 2 else 2, group=pair)
    except (ValueError, PeerError) as error:
        return _say(error)
    return "nothing"


def test_a_rank_that_waits_for_others_than_the_failed_one_ends_as_well() -> None:
    said = run_distributed(_wait_elsewhere, world_size=3, timeout=30)
    assert all(text.startswith("PeerError: rank 0, step 1: ValueError: alone") for text in said[1:])


def _agreed() -> tuple[str, str, float]:
    group = _group()
    error = ValueError("seen before") if dist.get_rank() == 2 else None
    try:
        with failing_together("step 2", everything=True), doing("router"):
            agree(error, group=group, where="the exchange")
    except (ValueError, PeerError) as raised:
        said, place = _say(raised), place_of(raised)
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return said, place, total.item()


def test_what_ranks_agreed_on_breaks_nothing_and_names_the_place() -> None:
    said = run_distributed(_agreed, world_size=3, timeout=30)
    assert [total for *_, total in said] == [3.0] * 3
    message = "PeerError: rank 2 failed before the exchange: ValueError: seen before "
    assert said[0][0].startswith(f"{message}(in step 2, router)")
    assert said[2][0].startswith("ValueError: seen before")


def _in_a_thread() -> str:
    group = _group()
    said: list[str] = []

    def helper(context: ThreadContext) -> None:
        try:
            with context.apply(), doing("backward side"):
                all_to_all(torch.ones(3, 1), group=group)
                if dist.get_rank() == 1:
                    time.sleep(0.2)  # until the main thread has failed
                all_to_all(torch.ones(3, 1), group=group)
        except RuntimeError as error:
            said.append(type(error).__name__)

    try:
        with failing_together("step 5"):
            thread = threading.Thread(target=helper, args=(ThreadContext.capture(),))
            thread.start()
            time.sleep(0.1)
            _raise_on(1, "main")
            all_to_all(torch.ones(3, 1), group=group)
    except (ValueError, PeerError) as error:
        text = _say(error)
    thread.join()
    return text


def test_groups_that_a_helper_thread_used_are_broken_as_well() -> None:
    said = run_distributed(_in_a_thread, world_size=3, timeout=30)
    assert said[0].startswith("PeerError: rank 1, step 5: ValueError: main")


def test_an_error_remembers_the_innermost_place() -> None:
    def fail() -> None:
        with doing("step 1"), doing("stage 2", "experts"):
            assert current_place() == "step 1, stage 2, experts"
            raise ValueError("x")

    with pytest.raises(ValueError) as caught:
        fail()
    assert place_of(caught.value) == "step 1, stage 2, experts"
    assert current_place() == ""


def test_a_report_survives_its_text_form_and_nothing_else_is_taken_for_one() -> None:
    report = FailureReport(3, "step 1", "ValueError: x", ("a", "b"))
    assert FailureReport.parse(report.encode()) == report
    for text in (
        "",
        "x",
        "[]",
        "{}",
        '{"rank": "1"}',
        '{"rank":true,"place":"","error":"","stack":[]}',
    ):
        assert FailureReport.parse(text) is None
    assert FailureReport.of(ValueError("a\n b"), rank=0).error == "ValueError: a b"


def test_the_first_report_counts() -> None:
    store = _internals.HashStore()
    first, second = FailureReport(0, "", "a"), FailureReport(1, "", "b")
    note = FailureNote(store, "key")
    assert note.read() is None
    assert note.leave(first) == first
    assert FailureNote(store, "key").leave(second) == first
    assert FailureNote(store, "key").read() == first
    assert FailureNote(None, "key").leave(second) == second


def _answer(place: str, *, waits: bool) -> Answer:
    return Answer(place, waits, ["line"])


def test_blame_falls_on_who_is_missing_then_on_who_waits_for_nobody() -> None:
    everyone = {0: _answer("a", waits=True), 1: _answer("b", waits=True)}
    named = {"me": 0, "place": "step 1", "text": "Timed out"}
    missing = blame(everyone, world_size=3, **named)  # type: ignore[arg-type]
    assert (missing.rank, missing.error[:20]) == (2, "is gone or stopped: ")
    busy = blame({**everyone, 2: _answer("c", waits=False)}, world_size=3, **named)  # type: ignore[arg-type]
    assert (busy.rank, busy.place, busy.stack) == (2, "c", ("line",))
    stuck = blame({**everyone, 2: _answer("c", waits=True)}, world_size=3, **named)  # type: ignore[arg-type]
    assert stuck.rank == 0
    assert "all ranks wait: rank 0 in a; rank 1 in b; rank 2 in c" in stuck.error


def test_echoes_are_told_from_causes() -> None:
    assert is_echo(RuntimeError("[..] Connection closed by peer [127.0.0.1]:1"))
    assert is_echo(PeerError("x", rank=1))
    assert not is_echo(ValueError("timed out"))
    assert not is_echo(RuntimeError("CUDA out of memory"))


def test_alone_an_error_passes_as_it_is() -> None:
    with pytest.raises(ValueError, match=r"^x$"), failing_together("step 1", everything=True):
        raise ValueError("x")


def _agreed_by_some() -> str:
    _group()
    pair = new_group([[0, 1], [2]], name="pair")
    assert pair is not None
    try:
        with failing_together("step", groups=[pair], everything=True):
            if dist.get_rank() < 2:
                error = ValueError("both")
                mark_agreed(error, [0, 1])
                raise error
            dist.recv(torch.ones(1), src=0)
    except (ValueError, PeerError) as raised:
        return _say(raised)
    finally:
        shutdown()
    return "nothing"


def test_an_agreement_of_some_ranks_is_told_to_the_others() -> None:
    said = run_distributed(_agreed_by_some, world_size=3, timeout=30)
    assert said[2].startswith("PeerError: rank ")
    assert "ValueError: both" in said[2]


def _recomputes(early_stop: bool) -> float:
    group = _group()
    x = torch.ones(3, 2, requires_grad=True)

    def exchange(x: torch.Tensor) -> torch.Tensor:
        with failing_together("layer"):
            return all_to_all(x * x, group=group).sin()

    with set_checkpoint_early_stop(early_stop):
        checkpoint(exchange, x, use_reentrant=False).sum().backward()
    return float(all_to_all(torch.ones(3, 1), group=group).sum())


@pytest.mark.parametrize("early_stop", [True, False])
def test_recomputation_that_ends_early_is_no_failure(early_stop: bool) -> None:
    assert run_distributed(_recomputes, early_stop, world_size=3) == [3.0] * 3
