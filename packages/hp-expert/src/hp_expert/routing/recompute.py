"""Routing decisions that a recompute takes from the forward it repeats.

Activation checkpointing runs a part of the model twice. If a router decides anew, a last bit that
differs (another kernel, a changed bias, noise) sends tokens to other experts, and the gradients are
those of another function, or the numbers of rows do not fit.

Note [One record per checkpoint]. What was decided belongs to one call of `checkpoint`: its two
contexts share a list that nobody else has. Contexts that are open in a thread form a stack. A
decision is taken from the innermost context that repeats, or made if none does, and all contexts
further in write it down: an inner checkpoint that an outer one runs again records what the outer
one repeats, and repeats that itself later. Where one of them counts operators, those of a decision
that is taken run all the same.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, TypeVar

from hp_platform import outside_graph

T = TypeVar("T")

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def save_routing(context_fn: Callable[[], Contexts] | None = None) -> Contexts:
    """Make the two contexts of a checkpoint whose recompute routes as its forward did.

    For `torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=save_routing)`, and
    for whatever hands keywords on to it. Any number of checkpoints may be open, nested, and in
    several threads. Between forward and recompute, each router's experts stay in memory: 8 bytes
    per token and choice.

    Args:
        context_fn: Makes the contexts to open around these, for example
            `partial(create_selective_checkpoint_contexts, policy)`; pass it with
            `functools.partial(save_routing, context_fn)`.

    Returns:
        The contexts of the forward and of the recompute.
    """
    around = (nullcontext(), nullcontext()) if context_fn is None else context_fn()
    decisions: list[tuple[object, Any]] = []
    # Selective checkpointing counts operators: those of a decision must run in both.
    runs_again = context_fn is not None
    return (
        _Recording(around[0], decisions, runs_again=runs_again),
        _Repeating(around[1], decisions, runs_again=runs_again),
    )


def decide(owner: object, make: Callable[[], T]) -> T:
    """Make a decision, or take the one that the forward made; see Note [One record per checkpoint].

    Args:
        owner: Who decides, usually a router; a recompute must ask in the same order.
        make: Called without gradients; what it returns must not carry any.

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
    """Around the forward, inside another context; may be entered again after it was left."""

    def __init__(
        self,
        around: AbstractContextManager[Any],
        decisions: list[tuple[object, Any]],
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
    """Around the recompute, and around each further one if the graph is kept."""

    def __enter__(self) -> None:
        self.position = 0
        super().__enter__()

    def repeat(self, owner: object) -> Any:
        """Return the next decision of the forward."""
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

    Set for each thread, as `torch.compile` does not see what takes the place of a class's default.
    """

    def __init__(self) -> None:
        self.contexts: tuple[_Recording, ...] = ()


_open = _Open()


def is_routing_saved() -> bool:
    """Tell whether a decision made now, in this thread, would be written down or repeated."""
    return bool(_open.contexts)
