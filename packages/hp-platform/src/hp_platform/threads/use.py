"""Who uses which process groups: the thread that a group belongs to, and what uses are counted to.

Note [A group belongs to a thread]. Backends pair the collectives of a group by their order alone.
Two threads without an order between them issue theirs in another order on each rank; then sizes do
not match, and Gloo ends the process. So a group belongs to the thread that used it first, and a
second one is refused before it sends anything, on every rank alike. A helper that runs under
`hp_platform.ThreadContext` belongs to the thread that was captured: whoever hands work over knows
its order. Threads of the autograd engine are nobody's; a thread that has ended leaves its groups to
the next, and one rank alone has no order to keep. Single sends and receives are matched by peer and
tag, and may come from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch.distributed import ProcessGroup


class Scope:
    """The groups that were used inside a `failing_together`, by whichever thread."""

    __slots__ = ("groups", "parent")

    def __init__(self, parent: Scope | None, groups: Iterable[ProcessGroup] = ()) -> None:
        self.parent = parent
        self.groups = {id(group): group for group in groups}


@dataclass(frozen=True, slots=True)
class Belonging:
    """What a helper thread shares with the thread that starts it.

    Attributes:
        thread: Thread whose groups it may use.
        scope: Scope to which its uses of groups are counted; None: none.
    """

    thread: threading.Thread
    scope: Scope | None


class _Mine(threading.local):
    """What a thread has of its own: whom it belongs to if it is a helper, and its scope."""

    captured: threading.Thread | None = None
    scope: Scope | None = None


_owners: WeakKeyDictionary[ProcessGroup, threading.Thread] = WeakKeyDictionary()
_mine = _Mine()


def note_use(group: ProcessGroup, *, ordered: bool = True) -> None:
    """Remember that this thread uses a group; every collective, send and receive says so.

    Args:
        group: Broken if what runs now fails: Note [Which groups] of `failures`.
        ordered: Whether ranks must come in one order, as to a collective; False for a message,
            which its peer and tag match.

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
    """Describe what a helper thread is to share with this one; `belonging_to` takes it."""
    return Belonging(_mine.captured or threading.current_thread(), _mine.scope)


@contextmanager
def belonging_to(other: Belonging) -> Iterator[None]:
    """Let this thread use the groups of another one, and count its uses as those of that."""
    before, _mine.captured = _mine.captured, other.thread
    try:
        with in_scope(other.scope):
            yield
    finally:
        _mine.captured = before


@contextmanager
def in_scope(scope: Scope | None) -> Iterator[None]:
    """Count uses inside the context to a scope as well; None for no other one."""
    before, _mine.scope = _mine.scope, scope or _mine.scope
    try:
        yield
    finally:
        _mine.scope = before


def current_scope() -> Scope | None:
    """Return what uses of this thread are counted to."""
    return _mine.scope
