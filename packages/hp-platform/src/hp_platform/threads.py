"""State that a thread hands to its helpers, words for what it is doing, and its process groups.

`doing` names the current work of each thread, for messages about failures. It costs less than a
microsecond, so that steps, microbatches and layers can be named. The words of a thread are its
place; other threads can read it: the thread that answers for a rank that hangs, and the threads of
the autograd engine, which have no place of their own.

`ThreadContext` captures thread-local state in one thread and applies it in a helper thread.

Note [A group belongs to a thread]. Backends match the collectives of a group by their order alone.
Two threads without a common order issue collectives in different orders on different ranks; sizes
then differ, and Gloo ends the process. So the first thread that uses a group owns it, and another
thread is refused on every rank before it sends anything. A helper that runs under
`hp_platform.ThreadContext` counts as the captured thread, because the code that hands over work
knows its order. Threads of the autograd engine own no groups and may use all of them. The groups of
a thread that has ended go to the next user, and a group of one rank needs no order. Single sends
and receives match by peer and tag, and may come from any thread.
"""

import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from types import FrameType, TracebackType
from typing import Self
from weakref import WeakKeyDictionary

import torch
from torch.distributed import ProcessGroup

from hp_platform import _internals

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


class Scope:
    """Groups that any thread has used inside a `failing_together`."""

    __slots__ = ("groups", "parent")

    def __init__(self, parent: "Scope | None", groups: Iterable[ProcessGroup] = ()) -> None:
        self.parent = parent
        self.groups = {id(group): group for group in groups}


@dataclass(frozen=True, slots=True)
class Belonging:
    """Facts that a helper thread shares with the thread that starts it.

    Attributes:
        thread: Thread whose groups the helper may use.
        scope: Scope that records its uses of groups; None: no scope.
    """

    thread: threading.Thread
    scope: Scope | None


class _Mine(threading.local):
    """Thread-local state: the captured thread of a helper, and the scope."""

    captured: threading.Thread | None = None
    scope: Scope | None = None


_owners: WeakKeyDictionary[ProcessGroup, threading.Thread] = WeakKeyDictionary()
_mine = _Mine()


def note_use(group: ProcessGroup, *, ordered: bool = True) -> None:
    """Record that this thread uses a group; every collective, send and receive calls this.

    Args:
        group: Process group, which is broken if the current work fails: Note [Which groups] of
            `failures`.
        ordered: Whether the operation is matched by order, as a collective is; False for a message,
            which is matched by peer and tag.

    Raises:
        ValueError: If the group belongs to another thread: Note [A group belongs to a thread].
    """
    if torch.compiler.is_compiling():
        return
    if ordered and _owners.get(group) is not threading.current_thread():
        _claim(group)
    scope = _mine.scope
    while scope is not None:
        scope.groups.setdefault(id(group), group)
        scope = scope.parent


def _claim(group: ProcessGroup) -> None:
    mine = belonging().thread
    foreign = isinstance(mine, threading._DummyThread)  # noqa: SLF001 - documented, without a name
    if foreign or group.size() == 1:
        return
    owner = _owners.setdefault(group, mine)
    if owner is not mine and owner.is_alive():
        raise ValueError(
            f"rank {group.rank()} of {group.size()}: thread ({mine.name}) must be the one that "
            f"used group {group.group_name} first ({owner.name}), which is still alive: give each "
            f"thread a group of its own, or run a helper under hp_platform.ThreadContext"
        )
    _owners[group] = mine


def belonging() -> Belonging:
    """Return the facts that a helper thread shares with this thread, for `belonging_to`."""
    return Belonging(_mine.captured or threading.current_thread(), _mine.scope)


@contextmanager
def belonging_to(other: Belonging) -> Iterator[None]:
    """Let this thread use the groups of another thread and record uses in its scope."""
    before, _mine.captured = _mine.captured, other.thread
    try:
        with in_scope(other.scope):
            yield
    finally:
        _mine.captured = before


@contextmanager
def in_scope(scope: Scope | None) -> Iterator[None]:
    """Record uses inside the context in a scope; None: in the current scope."""
    before, _mine.scope = _mine.scope, scope or _mine.scope
    try:
        yield
    finally:
        _mine.scope = before


def current_scope() -> Scope | None:
    """Return the scope that records the uses of this thread."""
    return _mine.scope


_AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class ThreadContext:
    """Thread-local state of torch; without it a new thread starts with torch's defaults.

    Attributes:
        stream: Current CUDA stream, which implies the device; None without CUDA.
        grad_enabled: Whether gradients are enabled.
        inference: Whether inference mode is on.
        autocast: Device type, whether autocast is enabled for it, and its dtype.
        autocast_cache: Whether autocast caches cast weights.
        multithreading: Whether backward may use the device threads of the autograd engine.
        words: Words for the work of the thread, for messages about failures.
        belonging: Owner of the groups that the thread may use, and scope in which uses of groups
            are recorded, so that a failure breaks them.
    """

    stream: torch.cuda.Stream | None
    grad_enabled: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    multithreading: bool
    words: tuple[str, ...]
    belonging: Belonging

    @classmethod
    def capture(cls) -> "ThreadContext":
        """Read the state of this thread."""
        # A request for the current stream would create a CUDA context in a process without one.
        on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(
            stream=torch.cuda.current_stream() if on_cuda else None,
            grad_enabled=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in _AUTOCAST_DEVICES
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
            multithreading=_internals.is_multithreading_enabled(),
            words=words_of_thread(),
            belonging=belonging(),
        )

    @contextmanager
    def apply(self) -> Iterator[None]:
        """Set the captured state in this thread inside the context."""
        # OpenMP gives a new thread all cores; this call makes torch set its own number of threads.
        torch.get_num_threads()
        with ExitStack() as stack:
            stack.enter_context(doing(*self.words))
            stack.enter_context(belonging_to(self.belonging))
            if self.stream is not None:
                stack.enter_context(torch.cuda.device(self.stream.device))
                stack.enter_context(torch.cuda.stream(self.stream))
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            stack.enter_context(torch.autograd.set_multithreading_enabled(self.multithreading))
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(
                    torch.autocast(
                        kind, dtype=dtype, enabled=enabled, cache_enabled=self.autocast_cache
                    )
                )
            yield
