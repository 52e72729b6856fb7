"""Verdicts on a rank that is gone or stuck: which rank is to blame, and where it stands.

The conclusion is a `Verdict`: the rank, the sentence about it, the exit status.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hp_base.errors import HangError, RankLostError
from hp_trainer.launch.heartbeats import Heartbeats, Slot, State

_SETTLE_SECONDS = 0.5
"""Between the first sign of a failure and the verdict: time for the others to show theirs."""
_LONGEST_PAUSE = 1.0
"""Two looks further apart than this mean that the launcher itself was stopped meanwhile."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a run cannot go on.

    Attributes:
        rank: Rank that it concerns.
        state: FAILED: it raised. RUNNING: it is gone or stuck. ABSENT: it never came.
        is_hang: Whether its process is still there and does nothing.
        status: Exit status of the run.
        message: One line.
    """

    rank: int
    state: State
    is_hang: bool
    status: int
    message: str


@dataclass
class Watch:
    """Looks at the heartbeats again and again until something is wrong.

    Args:
        heartbeats: Heartbeats of the run.
        hang_seconds: Seconds without progress of any rank that count as a hang.
        start_seconds: Seconds for all ranks to come.
        clock: Monotonic seconds.
        is_alive: Whether a process exists.
        ended: Exit status by rank of those whose process is known to have ended.
    """

    heartbeats: Heartbeats
    hang_seconds: float
    start_seconds: float
    clock: Callable[[], float] = time.monotonic
    is_alive: Callable[[int], bool] = lambda pid: process_state(pid) not in ("", "Z", "X")
    ended: Callable[[], Mapping[int, int]] = dict
    _progress: tuple[int, ...] = ()
    _progress_at: float = 0.0
    _looked_at: float = 0.0
    _failing_since: float | None = field(default=None)
    _lost_at: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._progress_at = self._looked_at = self.clock()

    def look(self) -> Verdict | None:
        """Return what is wrong, as soon as that can be told; None while all is well."""
        now, slots = self.clock(), self.heartbeats.slots()
        if now - self._looked_at > _LONGEST_PAUSE:
            self._progress_at += now - self._looked_at
        self._looked_at = now
        ended = self.ended()
        for slot in slots:
            is_gone = slot.state is State.ABSENT and slot.rank in ended
            if is_gone or (slot.state is State.RUNNING and not self.is_alive(slot.pid)):
                self._lost_at.setdefault(slot.rank, now)
        if self._failing_since is None:
            if self._lost_at or any(slot.state is State.FAILED for slot in slots):
                self._failing_since = now
            return self._hang(slots, now)
        return self._blame(slots) if now - self._failing_since >= _SETTLE_SECONDS else None

    def _blame(self, slots: Sequence[Slot]) -> Verdict:
        """Say who failed first, and not only because another one did."""
        failed = sorted(
            (slot for slot in slots if slot.state is State.FAILED), key=lambda slot: slot.ended_at
        )
        causes = [slot for slot in failed if not slot.is_echo]
        lost = min(self._lost_at.items(), key=lambda item: item[1], default=None)
        # A rank is seen to be lost a moment after it was.
        if causes and (lost is None or causes[0].ended_at < lost[1] - _SETTLE_SECONDS):
            return gone(causes[0])
        if lost is not None:
            return gone(slots[lost[0]])
        running = [slot for slot in slots if slot.state is State.RUNNING]
        if running:  # somebody waited in vain for one that is still there
            return _stuck(most_suspect(running), f"rank {failed[0].rank} gave up waiting for it")
        return gone(failed[0])

    def _hang(self, slots: Sequence[Slot], now: float) -> Verdict | None:
        progress = tuple(slot.sequence for slot in slots) + tuple(slot.state for slot in slots)
        if progress != self._progress:
            self._progress, self._progress_at = progress, now
        idle = now - self._progress_at
        absent = [slot.rank for slot in slots if slot.state is State.ABSENT]
        if absent:
            if idle <= max(self.start_seconds, self.hang_seconds):
                return None
            message = f"rank {absent[0]} did not start within {idle:.0f} s"
            return Verdict(absent[0], State.ABSENT, False, HangError.exit_code, message)
        running = [slot for slot in slots if slot.state is State.RUNNING]
        patience = self.hang_seconds
        if any(slot.sequence == 0 for slot in running):  # it is there, but still imports
            patience = max(self.start_seconds, patience)
        if not running or idle <= patience:
            return None
        return _stuck(most_suspect(running), f"no progress of any rank for {idle:.0f} s")


def gone(slot: Slot) -> Verdict:
    """Return the verdict about a rank that has raised, or whose process has ended."""
    if slot.state is State.FAILED:
        message = f"rank {slot.rank} failed at {slot.place}"
        return Verdict(slot.rank, slot.state, False, slot.status, message)
    where = "before it started" if slot.state is State.ABSENT else f"at {slot.place}"
    message = f"rank {slot.rank} was lost {where}"
    return Verdict(slot.rank, slot.state, False, RankLostError.exit_code, message)


def _stuck(slot: Slot, why: str) -> Verdict:
    how = "is stopped" if process_state(slot.pid) in ("T", "t") else "hangs"
    message = f"rank {slot.rank} {how} at {slot.place}: {why}"
    return Verdict(slot.rank, State.RUNNING, True, HangError.exit_code, message)


def most_suspect(running: Sequence[Slot]) -> Slot:
    """Return a stopped process, else one that waits for nobody, else the one furthest behind."""
    return min(
        running,
        key=lambda slot: (
            process_state(slot.pid) not in ("T", "t"),
            slot.waiting,
            slot.step,
            slot.beat_at,
        ),
    )


def process_state(pid: int) -> str:
    """Return the state letter of a process in Linux: ``T`` stopped, ``Z`` zombie; empty: gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]


def kill_ranks(slots: Sequence[Slot], signum: int = signal.SIGKILL) -> None:
    """Send a signal to every rank that is still there."""
    for slot in slots:
        if slot.pid:
            with suppress(ProcessLookupError):
                os.kill(slot.pid, signum)
