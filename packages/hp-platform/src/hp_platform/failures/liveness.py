"""Liveness of ranks: a thread of every rank answers for it, also while the rank hangs.

Note [Liveness check]. A rank that died writes no report, and a rank that hangs does not notice it.
So a rank whose wait has failed asks all ranks through the store. A thread of every rank answers
with the place of the rank, whether it waits for other ranks, and its Python stack. A rank without
an answer is gone or stopped; of the ranks with an answer, one that does not wait is the rank that
the others wait for. Without failures nothing is written: the thread only looks for a question twice
a second.
"""

import atexit
import json
import os
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from hp_platform import _internals
from hp_platform.failures.failures import (
    WORLD_KEY,
    FailureNote,
    FailureReport,
    ask_by,
    break_group,
    describe,
)
from hp_platform.failures.messages import as_form
from hp_platform.threads import describe_stacks, main_place, place_of

_KEY = "hp_platform/liveness"
_PROCESS_KEY = "hp_platform/process"
RANK_KEYS = (f"{_KEY}/[0-9]+", _PROCESS_KEY)
"""Patterns of keys that, followed by a rank, contain a statement of that rank about itself."""
_LOOK_SECONDS = 0.5
_ANSWER_SECONDS = 3.0
_SLOW_SECONDS = 15.0  # for processes of this machine that exist and are not stopped
_POLL_SECONDS = 0.05
_GONE = "is gone"
_LATE = "did not come"
_RANKS_PER_LOOK = 512  # a store of one host answers so many ranks at a time without delay


class Answer(NamedTuple):
    """Answer of a rank about itself.

    Attributes:
        place: Place of its main thread, in words.
        waits: Whether the rank waits for other ranks.
        stack: Python stack of its main thread, innermost frame first.
    """

    place: str
    waits: bool
    stack: list[str]

    @classmethod
    def now(cls) -> "Answer":
        """Describe this process."""
        waits, stack = describe_stacks()
        return cls(main_place(), waits, stack)

    @classmethod
    def parse(cls, text: bytes | str) -> "Answer | None":
        """Read an answer from the store; return None for other texts."""
        try:
            answer: Answer = as_form(cls, json.loads(text))
        except ValueError:
            return None
        return answer

    def encode(self) -> str:
        """Return a line of JSON."""
        return json.dumps(self)


def whom_to_blame(error: BaseException) -> FailureReport:
    """Ask all ranks, and report the rank to blame for an error that came from another rank.

    Args:
        error: Error of an operation that waited for other ranks.
    """
    world = dist.group.WORLD
    assert world is not None, "the caller has seen that there is one"
    me, text = world.rank(), describe(error)
    watcher = watch()
    answers = {} if watcher is None else watcher.ask_all()
    if answers is None:
        holder = "" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "it held the "
        return FailureReport(0, "", f"{_GONE}: {holder}store cannot be reached ({text})")
    return blame(answers, me=me, world_size=world.size(), place=place_of(error), text=text)


def is_loss(report: FailureReport) -> bool:
    """Tell whether a report says that a rank is gone."""
    return report.error.startswith(_GONE)


def is_hang(report: FailureReport) -> bool:
    """Tell whether a report says that a rank exists and others wait for it."""
    return report.error.startswith((_LATE, "HangError"))


def blame(
    answers: Mapping[int, Answer], *, me: int, world_size: int, place: str, text: str
) -> FailureReport:
    """Report the rank for which another rank waited in vain; see Note [Liveness check].

    Args:
        answers: Global rank -> its answer, without ranks that did not answer.
        me: Global rank that waited.
        world_size: Number of ranks.
        place: Place of the rank that waited.
        text: Error of the rank that waited.
    """
    waited = f"rank {me}{f', {place},' if place else ''} waited in vain: {text}"
    missing = [rank for rank in range(world_size) if rank != me and rank not in answers]
    if (missing and len(missing) < world_size - 1) or (world_size == 2 and missing):
        more = f", nor do ranks {missing[1:]}" if len(missing) > 1 else ""
        return FailureReport(
            missing[0], "", f"{_GONE} or stopped: it does not answer{more}; {waited}"
        )
    busy = [rank for rank, answer in answers.items() if rank != me and not answer.waits]
    if busy:
        culprit = answers[busy[0]]
        return FailureReport(busy[0], culprit.place, f"{_LATE}: {waited}", tuple(culprit.stack))
    others = "; ".join(
        f"rank {rank} in {a.place or 'an unnamed place'}" for rank, a in answers.items()
    )
    return FailureReport(me, place, f"{text}; all ranks wait: {others}" if others else text)


class Watcher:
    """Thread that answers for this rank, and that breaks groups after a failure of the whole job.

    Args:
        world: Default process group; the thread ends with it.
    """

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.world = weakref.ref(world)
        self._rank, self._size = world.rank(), world.size()
        # A separate connection: another thread may be waiting in the original.
        self._store = _internals.clone_of(_internals.default_store())
        self._note = FailureNote(self._store, WORLD_KEY)
        self._scale = max(1.0, self._size / _RANKS_PER_LOOK)
        self._next = 0
        self._is_broken = False
        self._store.set(f"{_PROCESS_KEY}/{self._rank}", _process())
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hp-platform-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, which must not use the store when the interpreter ends."""
        self._stopped.set()
        self._thread.join(2 * _LOOK_SECONDS)

    def ask_all(self) -> dict[int, Answer] | None:
        """Ask every rank for its place; see Note [Liveness check].

        Returns:
            Global rank -> answer, this rank included; None if the store cannot be reached.
        """
        try:
            store = _internals.clone_of(self._store)
            key = f"{_KEY}/{self._next}"
            store.compare_set(key, "", str(self._rank))
            keys = {rank: f"{key}/{rank}" for rank in range(self._size)}
            began = time.monotonic()
            while not store.check(list(keys.values())):
                missing = [rank for rank, key in keys.items() if not store.check([key])]
                if self._is_over(store, missing, time.monotonic() - began):
                    break
                time.sleep(_POLL_SECONDS * self._scale)
            found = {r: store.get(k) for r, k in keys.items() if store.check([k])}
        except RuntimeError:
            return None
        return {rank: answer for rank, text in found.items() if (answer := Answer.parse(text))}

    def _is_over(self, store: _internals.Store, missing: list[int], waited: float) -> bool:
        """Tell whether no further answers will come, by the states of processes of this machine."""
        states = {_state_of(store, rank) for rank in missing}
        if states == {"gone"}:
            return True
        limit = _SLOW_SECONDS if states <= {"gone", "there"} else _ANSWER_SECONDS
        return waited > limit * self._scale

    def _run(self) -> None:
        while not self._stopped.wait(_LOOK_SECONDS * self._scale):
            if dist.group.WORLD is not self.world():
                return
            try:
                self._look()
            except RuntimeError:  # the rank with the store is gone
                return

    def _look(self) -> None:
        while self._store.check([key := f"{_KEY}/{self._next}"]):
            self._store.set(f"{key}/{self._rank}", Answer.now().encode())
            self._next += 1
        if not self._is_broken and self._note.read() is not None:
            self._is_broken = True
            # This wakes the threads that wait; each finds the report and raises with it.
            for group in _internals.all_groups():
                break_group(group)


def _process() -> str:
    """Name this process so that processes of this machine, and no others, can inspect it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        boot = space = os.urandom(8).hex()
    return f"{boot} {space} {os.getpid()}"


def _state_of(store: _internals.Store, rank: int) -> str:
    """Return "gone", "stopped" or "there" for a rank of this machine; "" for other ranks."""
    key = f"{_PROCESS_KEY}/{rank}"
    if not store.check([key]):
        return ""
    machine, _, pid = store.get(key).decode(errors="replace").rpartition(" ")
    if machine != _process().rpartition(" ")[0] or not pid.isdecimal():
        return ""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "gone"
    return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(state, "there")


_watcher: Watcher | None = None
_lock = threading.Lock()


def watch() -> Watcher | None:
    """Start the thread that answers liveness checks; return None in a world of one rank."""
    global _watcher  # noqa: PLW0603 - one thread per process
    world = dist.group.WORLD
    if world is None or world.size() == 1:
        return None
    with _lock:
        if _watcher is None or _watcher.world() is not world:
            _watcher = Watcher(world)
        return _watcher


def stop_watching() -> None:
    """End the thread, before groups and their store are destroyed."""
    global _watcher
    with _lock:
        watcher, _watcher = _watcher, None
    if watcher is not None:
        watcher.stop()


atexit.register(stop_watching)


ask_by(whom_to_blame)
