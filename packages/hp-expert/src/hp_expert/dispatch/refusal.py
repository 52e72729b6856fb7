"""What becomes of a layer in which something fails on one rank.

Until the counts are exchanged, a rank that cannot go on says so in that exchange, and all ranks
raise with their groups intact: Note [All or none]. Later there is no such exchange, so it breaks
the groups of its dispatcher, and the ranks that wait for rows raise with its report.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from hp_expert.batch import ExpertBatch, LocalDispatcher, autocast
from hp_platform import PeerError, doing, failing_together, is_no_failure, mark_agreed
from hp_platform.groups.groups import global_ranks

refused: ContextVar[Exception | None] = ContextVar("refused", default=None)
"""Why this rank takes no part in an exchange that it enters only to say so."""


def groups_of(dispatcher: Any) -> list[ProcessGroup]:
    """Return the process groups over which a dispatcher exchanges; none if all experts are here."""
    holders = dispatcher, getattr(dispatcher, "over_ep", None)
    names = "group", "control", "small_group"
    found = [getattr(holder, name, None) for holder in holders for name in names]
    return [group for group in found if isinstance(group, ProcessGroup)]


@contextmanager
def dispatching(dispatcher: Any) -> Iterator[None]:
    """Run `prepare`: input that is wrong anywhere breaks nothing, a rank that is lost is named."""
    groups = groups_of(dispatcher)
    with failing_together("dispatch", groups=groups):
        try:
            yield
        except (ValueError, PeerError) as error:
            mark_agreed(error, (rank for group in groups for rank in global_ranks(group)))
            raise


def rows_for(dispatcher: Any, x_TD: Tensor) -> Tensor:
    """Return what `Dispatcher.prepare` gets of tokens: under autocast, what travels is narrow.

    Where nothing travels, the experts narrow the rows themselves, and sum in the dtype of `x_TD`.
    """
    return x_TD if type(dispatcher) is LocalDispatcher else autocast(x_TD)


def through_experts(
    dispatcher: Any, compute: Callable[[ExpertBatch], Tensor], rows: Tensor, state: Any
) -> Tensor:
    """Bring prepared rows to their experts and back; what fails on one rank fails on all.

    Args:
        dispatcher: Dispatcher that has prepared the rows.
        compute: Applies the experts of this rank.
        rows: Rows that `Dispatcher.prepare` returned.
        state: State that it returned with them.
    """
    with failing_together(groups=groups_of(dispatcher)):
        rows, state = dispatcher.launch_dispatch(rows, state)
        batch = dispatcher.finish_dispatch(rows, state)
        with doing("experts"):
            y = compute(batch)
        rows = dispatcher.launch_combine(y, state)
        combined: Tensor = dispatcher.finish_combine(rows, state)
    return combined


def refuse(dispatcher: Any, x_TD: Tensor, error: Exception) -> None:
    """Tell the other ranks of an error, in the exchange that they are about to enter.

    Args:
        dispatcher: Dispatcher of the layer.
        x_TD: Tokens of this rank, of which nothing is sent.
        error: Why it takes no part.
    """
    groups = groups_of(dispatcher)
    if not groups or is_no_failure(error):
        return
    before = refused.set(error)
    try:
        with suppress(Exception), dispatching(dispatcher):
            nothing = x_TD.new_empty(0, 0, 0)
            dispatcher.launch_dispatch(*dispatcher.prepare(x_TD, nothing))
    finally:
        refused.reset(before)
    mark_agreed(error, (rank for group in groups for rank in global_ranks(group)))
