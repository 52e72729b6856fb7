"""Uses of process groups: the thread that owns a group, and the scopes that record its uses.

Note [A group belongs to a thread]. Backends match the collectives of a group by their order alone.
Two threads without a common order issue collectives in different orders on different ranks; sizes
then differ, and Gloo ends the process. So the first thread that uses a group owns it, and another
thread is refused on every rank before it sends anything. A helper that runs under
`hp_platform.ThreadContext` counts as the captured thread, because the code that hands over work
knows its order. Threads of the autograd engine own no groups and may use all of them. The groups of
a thread that has ended go to the next user, and a group of one rank needs no order. Single sends
and receives match by peer and tag, and may come from any thread.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch.distributed import ProcessGroup


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
