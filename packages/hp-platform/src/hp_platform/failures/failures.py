"""One failure for all: every rank ends and names the rank that failed first, the place and error.

Note [First failure]. A rank that fails writes a report to the store of the default process group
before it breaks connections. A rank that fails because of a broken connection finds the report in
the store, passes it on to the groups that it has used itself, and raises with it. So a failure
spreads through overlapping groups until no rank waits. Of several reports the first counts. A rank
that died has written none: then the others check which ranks are alive
(`hp_platform.failures.liveness`).

Note [Which groups]. A failure inside `failing_together` breaks the groups that it was given and the
groups whose collectives of this package ran inside, in any thread of it; other groups of the
process still work. Around a whole training step all groups are broken.
"""

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
from hp_platform.threads import Scope, current_scope, doing, in_scope, mark_place, place_of

_MAX_CHARACTERS = 1500
_SETTLE_SECONDS = 1.0  # until a rank that breaks connections has written its report everywhere
_LOOK_SECONDS = 0.02
_CALM_SECONDS = 0.25  # until operations that were launched just before a failure have ended
_WAKE_TAG = 2  # tag of a message that no rank sends
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
"""Words in errors of Gloo, NCCL, shared memory and the store about a rank that is gone or late."""


class PeerError(RuntimeError):
    """Error of a rank that cannot continue because another rank has failed.

    Attributes:
        rank: Global rank that failed first.
        report: Report of its failure.
    """

    def __init__(self, message: str, *, rank: int, report: "FailureReport | None" = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.report = report or FailureReport(rank, "", message)


@dataclass(frozen=True, slots=True)
class FailureReport:
    """Report of a rank about its failure.

    Attributes:
        rank: Global rank that failed.
        place: Place of the failure, such as "step 3, stage 1, microbatch 5, experts".
        error: Type and message of the error.
        stack: Python stack of a rank that hangs, innermost frame first; empty otherwise.
    """

    rank: int
    place: str
    error: str
    stack: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: BaseException, *, rank: int) -> "FailureReport":
        """Describe an exception of a rank, with the place that `place_of` returns."""
        return cls(rank, place_of(error)[:_MAX_CHARACTERS], describe(error))

    @classmethod
    def parse(cls, text: bytes | str) -> "FailureReport | None":
        """Read the JSON that `encode` returns; return None for other texts."""
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
    """Return type and message of an error in one line, without the line of Gloo's sources."""
    text = " ".join(_SOURCE.sub("", str(error)).split())
    kind = type(error).__name__
    return (f"{kind}: {text}" if text else kind)[:_MAX_CHARACTERS]


class FailureNote:
    """Store entry with the report of the rank that failed first.

    Args:
        store: Store that the ranks share; None: the note is seen by this rank alone.
        key: Key of the report in the store, for a single failure.
    """

    def __init__(self, store: Store | None, key: str) -> None:
        self._store, self._key = store, key
        self._mine: FailureReport | None = None

    def leave(self, report: FailureReport) -> FailureReport:
        """Write a report unless there is one; return the first report."""
        found: FailureReport | None = self._mine
        if self._store is not None:
            # If the rank with the store is gone, this rank uses its own report.
            with suppress(RuntimeError):
                found = FailureReport.parse(self._store.compare_set(self._key, "", report.encode()))
        self._mine = found or report
        return self._mine

    def read(self) -> FailureReport | None:
        """Return the report of the rank that failed first; None if there is no report."""
        if self._store is not None and self._mine is None:
            with suppress(RuntimeError):
                if self._store.check([self._key]):
                    self._mine = FailureReport.parse(self._store.get(self._key))
        return self._mine


def default_note(key: str) -> FailureNote:
    """Return a note in the store of the default process group, if there is one."""
    return FailureNote(_internals.default_store() if dist.is_initialized() else None, key)


def world_note() -> FailureNote:
    """Return the note of all ranks, for failures that end the whole program."""
    return default_note(WORLD_KEY)


@contextmanager
def failing_together(
    *words: str,
    groups: Iterable[ProcessGroup] = (),
    everything: bool = False,
) -> Iterator[None]:
    """Run work of several ranks: if it fails on one rank, it fails on all within seconds.

    The rank that fails raises its own error with a note about the place. Ranks that fail because of
    it raise `PeerError` with its report: rank, place and error. Errors that ranks have agreed on
    (`hp_platform.agree`) do not change. See Note [First failure] and Note [Which groups].

    Args:
        *words: Words for the work, as in `doing`.
        groups: Process groups to break besides the groups that were used inside.
        everything: Whether to break all groups of this process, for example around a training step.

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
    """Report an error to the other ranks, break groups, and raise the error of the first failure.

    Args:
        error: Error of this rank.
        groups: Process groups to break; they cannot be used afterwards.
        everything: Whether to break all groups of this process.

    Raises:
        BaseException: The error itself, if this rank caused it.
        PeerError: If the error follows from the failure of another rank.
    """
    raised = error
    if not is_no_failure(error):
        raised = _broken_by(error, list(groups), everything=everything)
    if raised is error:
        raise error
    raise raised from error


def give_up(error: BaseException) -> BaseException:
    """Break now the groups that the `failing_together` around this thread would break at its end.

    One of several threads calls it after an error, to wake other threads that wait for ranks which
    in turn wait for this thread.

    Returns:
        Error that this rank should raise.
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
    # When a connection closes, Gloo wakes the operations that wait for their turn in it, but not
    # the message that it is writing or reading at that moment: the receiver of that message waits
    # until the time-out of the group (`Pair::signalException` of its TCP transport). So a failing
    # rank leaves its connections open for a moment, in which Gloo's threads finish the exchange
    # that the rank launched last, and that the others expect. A rank that is killed cannot do so,
    # and an echo comes of a connection that is closed already.
    if not is_echo(error):
        time.sleep(_CALM_SECONDS)
    for each in groups:
        break_group(each)
    return explained(error, first)


def first_failure(error: BaseException, notes: Sequence[FailureNote]) -> FailureReport:
    """Find the report of the first failure, and write it to notes that have none.

    Args:
        error: Error of this rank.
        notes: Notes to read and to write.
    """
    mine = FailureReport.of(error, rank=dist.get_rank())
    first = mine if not is_echo(error) else _report_of_another(error, notes) or mine
    for note in notes:
        first = note.leave(first)
    return first


def explained(error: BaseException, first: FailureReport) -> BaseException:
    """Return the error that a rank should raise: its own with a note, or a `PeerError`."""
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


def _ask_nobody(error: BaseException) -> FailureReport | None:  # noqa: ARG001 - no rank is asked
    return None


_asker: Callable[[BaseException], FailureReport | None] = _ask_nobody


def ask_by(asker: Callable[[BaseException], FailureReport | None]) -> None:
    """Set the function that finds the rank to blame for an error without a report.

    Args:
        asker: Function that asks the other ranks; see `hp_platform.failures.liveness`.
    """
    global _asker  # noqa: PLW0603 - one function for the process
    _asker = asker


def _report_of_another(error: BaseException, notes: Sequence[FailureNote]) -> FailureReport | None:
    # A failure of the whole program breaks the groups of its parts as well.
    notes = [*notes, world_note()]
    if (own := _report_in(error)) is not None:
        return next(filter(None, (note.read() for note in notes)), own)
    deadline, suspected = time.monotonic() + _SETTLE_SECONDS, None
    while True:
        if found := next(filter(None, (note.read() for note in notes)), None):
            return found
        if suspected is None:  # at once, while a rank that does not come is still there
            suspected = _asker(error)
        elif time.monotonic() > deadline:
            return suspected
        time.sleep(_LOOK_SECONDS)


def is_echo(error: BaseException) -> bool:
    """Tell whether an error only follows from another rank that is gone, is late or has failed.

    Such errors are those of Gloo, NCCL and stores with certain words, and errors with an attribute
    `report` of type `FailureReport`, such as `PeerError`.
    """
    if _report_in(error) is not None:
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(echo in text for echo in _ECHOES)


def is_no_failure(error: BaseException) -> bool:
    """Tell whether an exception only ends work early, such as a recomputation that is complete."""
    name = f"{type(error).__module__}.{type(error).__name__}"
    early = name == "torch.utils.checkpoint._StopRecomputationError"
    return early or isinstance(error, GeneratorExit)


def _report_in(error: BaseException) -> FailureReport | None:
    report = getattr(error, "report", None)
    return report if isinstance(report, FailureReport) else None


def mark_agreed(error: BaseException, ranks: Iterable[int]) -> None:
    """Mark an error that all of some ranks raise at this point, so that it need not be reported."""
    setattr(error, _AGREED, frozenset(ranks))


def is_agreed(
    error: BaseException, groups: Iterable[ProcessGroup], *, everything: bool = False
) -> bool:
    """Tell whether all ranks of some groups, or with `everything` of the world, raise together."""
    ranks: frozenset[int] = getattr(error, _AGREED, frozenset())
    concerned = [dist.group.WORLD] if everything else list(groups)
    return all(ranks.issuperset(global_ranks(group)) for group in concerned if group is not None)


def break_group(group: ProcessGroup) -> None:
    """Fail all operations of a group, on this rank and on peers that wait for this rank.

    Gloo has no call that wakes a thread of this process, but it closes all connections of a group
    when one wait in it times out. The group cannot be used afterwards.
    """
    if group.size() == 1:
        return
    try:
        backend = dist.get_backend(group)
    except ValueError:  # it was destroyed already
        return
    if "nccl" in backend:
        # The call waits for kernels of other groups too, which must not delay the error.
        threading.Thread(target=group.abort, daemon=True).start()
        return
    peer = (group.rank() + 1) % group.size()
    with suppress(RuntimeError):
        group.recv([torch.empty(1, device="cpu")], peer, _WAKE_TAG).wait(timedelta(milliseconds=1))
