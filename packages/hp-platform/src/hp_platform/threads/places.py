"""Words for the current work of each thread of this process, for messages about failures.

`doing` costs less than a microsecond, so that steps, microbatches and layers can be named. The
words of a thread are its place; other threads can read it: the thread that answers for a rank that
hangs, and the threads of the autograd engine, which have no place of their own.
"""

import sys
import threading
import traceback
from itertools import islice
from types import FrameType, TracebackType
from typing import Self

_places: dict[int, tuple[str, ...]] = {}
_STACK_FRAMES = 12
_WAITING_FRAMES = 3  # torch's operators may be between the caller and the wait
_MARK = "hp_place"

# Files whose frames are on the stack of a thread that waits for other ranks.
_WAITING = (
    "torch/distributed/",
    "hp_platform/collectives/collectives.py",
    "hp_platform/failures/failures.py",
    "hp_platform/collectives/pending.py",
    "hp_platform/failures/liveness.py",
    "hp_platform/collectives/shared_memory.py",
    "hp_vtp/transport/handles.py",
)


class doing:  # noqa: N801 - reads as a statement: `with doing("step 3"):`
    """Add words to the place of this thread inside the context; the innermost words come last.

    An exception that leaves the context stores the whole place, see `place_of`.

    Args:
        *words: Words for the work inside the context, for example `"step 3"`, `"experts"`.

    Example:
        >>> with doing("step 3"), doing("experts"):
        ...     current_place()
        'step 3, experts'
    """

    __slots__ = ("_before", "_words")

    def __init__(self, *words: str) -> None:
        self._words = words

    def __enter__(self) -> Self:
        thread = threading.get_ident()
        self._before = _places.get(thread, ())
        _places[thread] = self._before + self._words
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            mark_place(error)
        thread = threading.get_ident()
        if self._before:
            _places[thread] = self._before
        else:
            _places.pop(thread, None)


def words_of_thread() -> tuple[str, ...]:
    """Return the words of this thread, outermost first, for `doing` in a helper thread."""
    return _places.get(threading.get_ident(), ())


def current_place() -> str:
    """Return the place of this thread; if it has none, the place of the main thread."""
    return ", ".join(words_of_thread()) or main_place()


def main_place() -> str:
    """Return the place of the main thread; any thread may call this."""
    return ", ".join(_places.get(threading.main_thread().ident or 0, ()))


def mark_place(error: BaseException, place: str = "") -> None:
    """Store the current place in an exception, unless it has one.

    Args:
        error: Exception that was raised.
        place: Words to add to the current place.
    """
    if not getattr(error, _MARK, ""):
        setattr(error, _MARK, ", ".join(filter(None, (current_place(), place))))


def place_of(error: BaseException) -> str:
    """Return the place stored in an exception, else the current place."""
    place: str = getattr(error, _MARK, "") or current_place()
    return place


def describe_stacks() -> tuple[bool, list[str]]:
    """Describe the stacks of this process; any thread may call this.

    Returns:
        Whether any thread waits for other ranks, and the Python stack of the main thread, innermost
        frame first.
    """
    frames = sys._current_frames()  # noqa: SLF001 - documented, the underscore is its name
    mine = threading.get_ident()
    waiting = any(
        _waits(frame) for thread, frame in frames.items() if thread != mine and thread in _places
    )
    main = frames.get(threading.main_thread().ident or 0)
    if main is None:
        return waiting, []
    waiting = waiting or _waits(main)
    entries = traceback.extract_stack(main)[::-1][:_STACK_FRAMES]
    return waiting, [f'File "{e.filename}", line {e.lineno}, in {e.name}' for e in entries]


def _waits(innermost: FrameType) -> bool:
    """Tell whether the innermost frames of a thread include a function that waits for ranks."""
    frames = islice(traceback.walk_stack(innermost), _WAITING_FRAMES)
    return any(part in frame.f_code.co_filename for frame, _ in frames for part in _WAITING)
