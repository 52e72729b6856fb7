"""One failure for all: every rank ends, and says which rank failed first, where and why.

Note [First failure]. A rank that fails leaves a report in the store of the default process group
and only then breaks connections. A rank that fails because of that finds the report there and
raises with it, after it has passed it on to the groups that it used itself; so a failure travels
through groups that overlap until no rank waits. Of several reports the first one counts. A rank
that died has left none: then the others ask who is still there (`hp_platform.failures.liveness`).

Note [Which groups]. A failure inside `failing_together` breaks the groups whose collectives of this
package ran in it, in any thread that belongs to it, or the groups that it was given; the other
groups of the process still work. Around a whole training step, everything is given up together.

Note [Calm before a break]. Gloo wakes what waits for its turn in a connection that closes, but not
the message that it is writing or reading there at that moment: whoever waits for that one waits
until the time-out of the group (`Pair::signalException` of its TCP transport). So a rank that fails
leaves its connections open for a moment, in which Gloo's threads finish what is under way: the
exchange that it launched last, for which the others were ready. A rank that is killed cannot.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hp_platform import _internals
from hp_platform._internals import Store
from hp_platform.groups import global_ranks
from hp_platform.threads.places import doing, mark_place, place_of
from hp_platform.threads.use import Scope, current_scope, in_scope

_MAX_CHARACTERS = 1500
_SETTLE_SECONDS = 1.0  # for a rank that breaks connections to have left its report everywhere
_LOOK_SECONDS = 0.02
_CALM_SECONDS = 0.25  # for what was launched just before a failure to be through
_WAKE_TAG = 2  # of a message that nobody sends
WORLD_KEY = "hp_platform/failure/world"
_AGREED = "hp_agreed"
_SOURCE = re.compile(r"\[/[^\]\s]*:\d+\] ")
_ECHOES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection was likely closed",
    "application timeout caused pair closure",
    "broken pipe",
    "timed out",
    "timeout after",
    "wait timeout",
    "it has ended",
    "did not come within",
    "nccl",
)
"""What Gloo, NCCL, shared memory and the store say when another rank is gone or late."""


class PeerError(RuntimeError):
    """Another rank failed, and this one cannot go on without it.

    Attributes:
        rank: Global rank of the first one that failed.
        report: What is known of its failure.
    """

    def __init__(self, message: str, *, rank: int, report: FailureReport | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.report = report or FailureReport(rank, "", message)


@dataclass(frozen=True, slots=True)
class FailureReport:
    """What a rank says of its failure.

    Attributes:
        rank: Global rank that failed.
        place: What it was doing, such as "step 3, stage 1, microbatch 5, experts".
        error: Type and message of its error.
        stack: Python stack of a rank that is stuck, innermost frame first; empty otherwise.
    """

    rank: int
    place: str
    error: str
    stack: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: BaseException, *, rank: int) -> FailureReport:
        """Describe an exception of a rank; where it was raised is `place_of` the exception."""
        return cls(rank, place_of(error)[:_MAX_CHARACTERS], describe(error))

    @classmethod
    def parse(cls, text: bytes | str) -> FailureReport | None:
        """Read what `encode` wrote; None for anything else."""
        try:
            fields = json.loads(text)
            rank, place, error = fields["rank"], fields["place"], fields["error"]
            stack = tuple(map(str, fields["stack"]))
        except (ValueError, TypeError, KeyError):
            return None
        if type(rank) is not int or not isinstance(place, str) or not isinstance(error, str):
            return None
        return cls(rank, place, error, stack)

    def encode(self) -> str:
        """Return a line of JSON."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        place = f", {self.place}" if self.place else ""
        return f"rank {self.rank}{place}: {self.error}"


def describe(error: BaseException) -> str:
    """Type and message of an error in one line, without the place in Gloo's sources."""
    text = " ".join(_SOURCE.sub("", str(error)).split())
    kind = type(error).__name__
    return (f"{kind}: {text}" if text else kind)[:_MAX_CHARACTERS]


class FailureNote:
    """The report of the rank that failed first among those that share a key.

    Args:
        store: Shared by the ranks; None keeps the report of each rank to itself.
        key: Key of the report in the store; used for one failure.
    """

    def __init__(self, store: Store | None, key: str) -> None:
        self._store, self._key = store, key
        self._mine: FailureReport | None = None

    def leave(self, report: FailureReport) -> FailureReport:
        """Leave a report if it is the first one; return the first one."""
        found: FailureReport | None = self._mine
        if self._store is not None:
            # Without the rank that holds the store, what this rank knows must do.
            with suppress(RuntimeError):
                found = FailureReport.parse(self._store.compare_set(self._key, "", report.encode()))
        self._mine = found or report
        return self._mine

    def read(self) -> FailureReport | None:
        """Return the report of the rank that failed first, None if none has."""
        if self._store is not None and self._mine is None:
            with suppress(RuntimeError):
                if self._store.check([self._key]):
                    self._mine = FailureReport.parse(self._store.get(self._key))
        return self._mine


def default_note(key: str) -> FailureNote:
    """Return a note in the store of the default process group, if there is one."""
    return FailureNote(_internals.default_store() if dist.is_initialized() else None, key)


def world_note() -> FailureNote:
    """The note of all ranks: what ended a program as a whole."""
    return default_note(WORLD_KEY)


@contextmanager
def failing_together(
    *words: str,
    groups: Iterable[ProcessGroup] = (),
    everything: bool = False,
) -> Iterator[None]:
    """Run what ranks do together: if it fails on one of them, it fails on all within seconds.

    The rank that fails raises its own error, with a note that says where. Ranks that fail because
    of it raise `PeerError` with its report: rank, place and error. Errors that ranks have agreed on
    (`hp_platform.agree`) pass as they are. See Note [First failure] and Note [Which groups].

    Args:
        *words: What is being done, as for `doing`.
        groups: Process groups to break besides those that were used inside.
        everything: Break all groups of this process, for example around a training step.

    Raises:
        PeerError: If this rank fails because another one did.
    """
    scope = Scope(current_scope(), groups)
    with doing(*words), in_scope(scope):
        try:
            yield
        except BaseException as error:
            if is_no_failure(error):
                raise
            mark_place(error)
            used = list(scope.groups.values())
            if not dist.is_initialized() or is_agreed(error, used, everything=everything):
                raise
            raise_first(error, used, everything=everything)
        finally:
            scope.parent = None


def raise_first(
    error: BaseException, groups: Iterable[ProcessGroup], *, everything: bool = False
) -> NoReturn:
    """Tell the other ranks of an error, break groups, and raise what this rank should.

    Args:
        error: Error of this rank.
        groups: Process groups to break; nobody can use them any more.
        everything: Break all groups of this process.

    Raises:
        BaseException: The error itself where it is one of this rank.
        PeerError: Where it only came of another rank's.
    """
    raised = error
    if not is_no_failure(error):
        raised = _broken_by(error, list(groups), everything=everything)
    if raised is error:
        raise error
    raise raised from error


def give_up(error: BaseException) -> BaseException:
    """Break at once what `failing_together` around this thread would break in the end.

    For one of several threads that run in it: others wake that wait for ranks which wait for this
    one.

    Returns:
        What this rank is to raise.
    """
    scope = current_scope()
    groups = [] if scope is None else list(scope.groups.values())
    if is_no_failure(error) or not groups or is_agreed(error, groups):
        return error
    mark_place(error)
    return _broken_by(error, groups, everything=False)


def _broken_by(
    error: BaseException, groups: list[ProcessGroup], *, everything: bool
) -> BaseException:
    notes = [default_note(f"hp_platform/failure/group/{each.group_name}") for each in groups]
    if everything:
        notes.insert(0, world_note())
        groups = groups + _internals.all_groups()
    first = first_failure(error, notes)
    if not is_echo(error):  # see Note [Calm before a break]; an echo comes of a closed connection
        time.sleep(_CALM_SECONDS)
    for each in groups:
        break_group(each)
    return explained(error, first)


def first_failure(error: BaseException, notes: Sequence[FailureNote]) -> FailureReport:
    """Find out who failed first, this rank or the one its error came from, and pass it on.

    Args:
        error: Error of this rank.
        notes: Read for a report, and left one where there is none.
    """
    mine = FailureReport.of(error, rank=dist.get_rank())
    first = mine if not is_echo(error) else _report_of_another(error, notes) or mine
    for note in notes:
        first = note.leave(first)
    return first


def explained(error: BaseException, first: FailureReport) -> BaseException:
    """Return what a rank is to raise: its own error with a note, or one that names another rank."""
    me = dist.get_rank()
    if is_echo(error) and first.rank != me:
        peer = PeerError(str(first), rank=first.rank, report=first)
        for note in getattr(error, "__notes__", ()):
            peer.add_note(note)
        return peer
    if place := place_of(error):
        error.add_note(f"on rank {me}, {place}")
    if first.rank != me or is_echo(error):
        error.add_note(f"began on {first}")
    return error


def _ask_nobody(error: BaseException) -> FailureReport | None:  # noqa: ARG001 - nobody is asked
    return None


_asker: Callable[[BaseException], FailureReport | None] = _ask_nobody


def ask_by(asker: Callable[[BaseException], FailureReport | None]) -> None:
    """Say how to find out whom an error is to be blamed on that nobody has reported.

    Args:
        asker: Asks the other ranks; see `hp_platform.failures.liveness`.
    """
    global _asker  # noqa: PLW0603 - one way of asking in a process
    _asker = asker


def _report_of_another(error: BaseException, notes: Sequence[FailureNote]) -> FailureReport | None:
    # What ended the whole program breaks the groups of its parts as well.
    notes = [*notes, world_note()]
    if (told := _told(error)) is not None:
        return next(filter(None, (note.read() for note in notes)), told)
    deadline, suspected = time.monotonic() + _SETTLE_SECONDS, None
    while True:
        if found := next(filter(None, (note.read() for note in notes)), None):
            return found
        if suspected is None:  # at once, while whoever does not come is still seen not coming
            suspected = _asker(error)
        elif time.monotonic() > deadline:
            return suspected
        time.sleep(_LOOK_SECONDS)


def is_echo(error: BaseException) -> bool:
    """Tell whether an error only says that another rank is gone, late or has failed.

    That is what Gloo, NCCL and stores say in words, and any error whose `report` is a
    `FailureReport`, as `PeerError`'s is.
    """
    if _told(error) is not None:
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(echo in text for echo in _ECHOES)


def is_no_failure(error: BaseException) -> bool:
    """Say if an exception only ends something early, as in recomputation when all is there."""
    name = f"{type(error).__module__}.{type(error).__name__}"
    early = name == "torch.utils.checkpoint._StopRecomputationError"
    return early or isinstance(error, GeneratorExit)


def _told(error: BaseException) -> FailureReport | None:
    report = getattr(error, "report", None)
    return report if isinstance(report, FailureReport) else None


def mark_agreed(error: BaseException, ranks: Iterable[int]) -> None:
    """Say that all of some ranks raise at this point, so that none of them has to be told."""
    setattr(error, _AGREED, frozenset(ranks))


def is_agreed(
    error: BaseException, groups: Iterable[ProcessGroup], *, everything: bool = False
) -> bool:
    """Say if all ranks of some groups raise together, or with `everything` those of the world."""
    ranks: frozenset[int] = getattr(error, _AGREED, frozenset())
    concerned = [dist.group.WORLD] if everything else list(groups)
    return all(ranks.issuperset(global_ranks(group)) for group in concerned if group is not None)


def break_group(group: ProcessGroup) -> None:
    """Fail all operations of a group, this rank's and those of peers that wait for this rank.

    Gloo has no call that wakes a thread of this process, but it gives up all connections of a group
    as soon as one wait in it has taken too long. The group cannot be used any more.
    """
    if group.size() == 1:
        return
    try:
        backend = dist.get_backend(group)
    except ValueError:  # it was destroyed already
        return
    if "nccl" in backend:
        # It waits for kernels of other groups too, which must not hold up the error.
        threading.Thread(target=group.abort, daemon=True).start()
        return
    peer = (group.rank() + 1) % group.size()
    with suppress(RuntimeError):
        group.recv([torch.empty(1, device="cpu")], peer, _WAKE_TAG).wait(timedelta(milliseconds=1))
