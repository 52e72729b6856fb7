"""Failures of one rank inside a layer of experts, raised on all ranks.

Until the counts are exchanged, a rank that fails says so in that exchange, and all ranks raise with
their groups intact: Note [All or none]. Later there is no such exchange: the rank breaks the groups
of its dispatcher, and the ranks that wait for its rows raise an error with its report.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from torch import Tensor
from torch.distributed import ProcessGroup

from hp_expert.batch import ExpertBatch, LocalDispatcher, autocast
from hp_expert.dispatch import AnyDispatcher
from hp_platform import PeerError, doing, failing_together, is_no_failure, mark_agreed
from hp_platform.groups import global_ranks

refused: ContextVar[Exception | None] = ContextVar("refused", default=None)
"""Error of this rank while it enters an exchange only to report it."""


def groups_of(dispatcher: object) -> list[ProcessGroup]:
    """Return the groups over which a dispatcher exchanges; none if all experts are local."""
    holders = dispatcher, getattr(dispatcher, "over_ep", None)
    names = "group", "control", "small_group"
    found = [getattr(holder, name, None) for holder in holders for name in names]
    return [group for group in found if isinstance(group, ProcessGroup)]


@contextmanager
def dispatching(dispatcher: object) -> Iterator[None]:
    """Run `prepare`: wrong input of any rank leaves the groups intact, a lost rank is named."""
    groups = groups_of(dispatcher)
    with failing_together("dispatch", groups=groups):
        try:
            yield
        except (ValueError, PeerError) as error:
            mark_agreed(error, (rank for group in groups for rank in global_ranks(group)))
            raise


def rows_for(dispatcher: object, x_TD: Tensor) -> Tensor:
    """Return the tokens in the dtype that `Dispatcher.prepare` gets: under autocast a narrow one.

    Without an exchange, the experts narrow the rows themselves, and sum in the dtype of `x_TD`.
    """
    return x_TD if type(dispatcher) is LocalDispatcher else autocast(x_TD)


def through_experts(
    dispatcher: AnyDispatcher,
    compute: Callable[[ExpertBatch], Tensor],
    rows: Tensor,
    state: object,
) -> Tensor:
    """Bring prepared rows to their experts and back; a failure of one rank raises on all.

    Args:
        dispatcher: Dispatcher that has prepared the rows.
        compute: Function that applies the experts of this rank.
        rows: Rows that `Dispatcher.prepare` returned.
        state: State that `Dispatcher.prepare` returned.
    """
    with failing_together(groups=groups_of(dispatcher)):
        rows, state = dispatcher.launch_dispatch(rows, state)
        batch = dispatcher.finish_dispatch(rows, state)
        with doing("experts"):
            y = compute(batch)
        rows = dispatcher.launch_combine(y, state)
        return dispatcher.finish_combine(rows, state)


def refuse(dispatcher: AnyDispatcher, x_TD: Tensor, error: Exception) -> None:
    """Tell the other ranks of an error of this rank, in the exchange that they are about to enter.

    Args:
        dispatcher: Dispatcher of the layer.
        x_TD: Tokens of this rank, none of which are sent.
        error: Error to tell them.
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
