"""Routing decisions that a recompute takes from the forward it repeats.

Activation checkpointing runs a part of the model twice. If a router decided again, a last bit that
differs (another kernel, a changed bias, noise) would send tokens to other experts: the gradients
would be those of another function, or the numbers of rows would not fit.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from hp_platform import outside_graph

T = TypeVar("T")

Contexts: TypeAlias = tuple[AbstractContextManager[object], AbstractContextManager[object]]
_Decisions: TypeAlias = list[tuple[object, Any]]
"""Owner and result of each decision, of whatever type the owner decides."""


def save_routing(context_fn: Callable[[], Contexts] | None = None) -> Contexts:
    """Make the two contexts of a checkpoint whose recompute routes as its forward did.

    For `torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=save_routing)`, and
    for functions that pass keywords to it. Any number of checkpoints may be open, nested, and in
    several threads. Between forward and recompute, the experts that routers chose stay in memory: 8
    bytes per token and choice.

    Args:
        context_fn: Function that makes contexts to open around these, for example
            `partial(create_selective_checkpoint_contexts, policy)`; pass it with
            `functools.partial(save_routing, context_fn)`.

    Returns:
        The contexts of the forward and of the recompute.
    """
    around = (nullcontext(), nullcontext()) if context_fn is None else context_fn()
    decisions: _Decisions = []
    # Selective checkpointing counts operators: those of a decision must run in both contexts.
    runs_again = context_fn is not None
    return (
        _Recording(around[0], decisions, runs_again=runs_again),
        _Repeating(around[1], decisions, runs_again=runs_again),
    )


def decide(owner: object, make: Callable[[], T]) -> T:
    """Make a decision, or take the one that the forward made.

    Decisions belong to one call of `checkpoint`: its two contexts share a list of their own. The
    contexts that are open in a thread form a stack. A decision is taken from the innermost context
    that repeats, or made if none repeats, and all contexts inside of that one record it: an inner
    checkpoint that an outer one runs again records the decisions that the outer one repeats, and
    repeats them later. Where one of these contexts counts operators, the operators of a repeated
    decision run as well.

    Args:
        owner: Object that decides, usually a router; a recompute must decide in the same order.
        make: Function that decides without gradients.

    Raises:
        RuntimeError: If a recompute decides more often than its forward, or in another order.
    """
    return _decide_in_contexts(owner, make) if _open.contexts else make()


@outside_graph
def _decide_in_contexts(owner: object, make: Callable[[], T]) -> T:
    """Decide outside of compiled graphs, so that a recompute runs the graphs of its forward."""
    recordings: list[_Recording] = []
    for context in reversed(_open.contexts):
        if isinstance(context, _Repeating):
            decision: T = context.repeat(owner)
            if context.runs_again or any(recording.runs_again for recording in recordings):
                make()
            break
        recordings.append(context)
    else:
        decision = make()
    for recording in recordings:
        recording.decisions.append((owner, decision))
    return decision


class _Recording:
    """The context of the forward, inside another context; may be entered several times."""

    def __init__(
        self,
        around: AbstractContextManager[object],
        decisions: _Decisions,
        *,
        runs_again: bool,
    ) -> None:
        self.around, self.decisions, self.runs_again = around, decisions, runs_again

    def __enter__(self) -> None:
        self.around.__enter__()
        _open.contexts = (*_open.contexts, self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        _open.contexts = _open.contexts[:-1]
        return self.around.__exit__(kind, error, traceback)


class _Repeating(_Recording):
    """The context of the recompute, and of each further one if the graph is retained."""

    def __enter__(self) -> None:
        self.position = 0
        super().__enter__()

    def repeat(self, owner: object) -> Any:
        """Return the next decision of the forward, of the type that its owner decides."""
        if self.position == len(self.decisions):
            raise RuntimeError(
                f"routing decisions of a recompute ({self.position + 1}) must not be more than "
                f"those of its forward ({len(self.decisions)})"
            )
        first_owner, decision = self.decisions[self.position]
        if first_owner is not owner:
            raise RuntimeError(
                f"routing decision {self.position} of a recompute ({owner}) must be made by the "
                f"router that made it in forward ({first_owner})"
            )
        self.position += 1
        return decision


class _Open(threading.local):
    """The contexts that are open in this thread, innermost last.

    Set in each thread: `torch.compile` does not see an attribute that hides a default of the class.
    """

    def __init__(self) -> None:
        self.contexts: tuple[_Recording, ...] = ()


_open = _Open()


def is_routing_saved() -> bool:
    """Tell whether a decision made now, in this thread, would be recorded or repeated."""
    return bool(_open.contexts)
