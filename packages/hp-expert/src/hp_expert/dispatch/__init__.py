"""The protocol of dispatchers: rows go to the ranks of their experts and back, in stateless calls.

A dispatcher is a value without memory: everything that a later call must know is in the
`DispatchState` that the earlier call returned. So any number of microbatches may be between their
dispatch and their combine, in any threads, and a recompute changes nothing for the others.

Between its first argument and its first result, a launch is one lazy all-to-all: nothing has waited
for its result, nor in backward for the gradient of its argument. Work that follows a launch, in
either direction, overlaps with the exchange. This is why rows are sorted and gathered before the
launch, in `prepare`, and summed after it, in `finish_combine`.

Failures of one rank inside a layer of experts are raised on all ranks. Until the counts are
exchanged, a rank that fails says so in that exchange, and all ranks raise with their groups intact:
Note [All or none]. Later there is no such exchange: the rank breaks the groups of its dispatcher,
and the ranks that wait for its rows raise an error with its report.

Shape symbols: T tokens, K experts per token, S = T * K slots, E experts, L local experts, R rows
received, D width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from torch import Tensor
from torch.distributed import ProcessGroup

from hp_expert.batch import ExpertBatch, LocalDispatcher, autocast
from hp_expert.dispatch.deduplicated import SlotExchange
from hp_expert.permute import Permutation
from hp_platform import PeerError, doing, failing_together, is_no_failure, mark_agreed
from hp_platform.groups import global_ranks

StartedT = TypeVar("StartedT")
StateT = TypeVar("StateT")
StateT_co = TypeVar("StateT_co", covariant=True)


class Dispatcher(Protocol[StateT]):
    """Four calls that carry rows to their experts and back, after one that prepares the rows.

    For one batch they are called in this order; calls for several batches may interleave. A
    module uses the dispatcher in `GroupedExperts.dispatcher`.
    """

    def prepare(
        self, x: Tensor, experts: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, StateT]:
        """Check and sort the slots of tokens.

        Args:
            x: Tokens [T, D].
            experts: Experts of each token, int64 [T, K]; -1 for a slot that was dropped: it is not
                sent, adds nothing, and its weight gets a gradient of exactly 0.
            weights: Factor of each expert's output [T, K]; None: one.

        Returns:
            Rows to send, and the state for the other calls.

        Raises:
            ValueError: If the input is wrong.
            hp_platform.PeerError: If the input of another rank is wrong.
        """

    def launch_dispatch(self, rows: Tensor, state: StateT) -> tuple[Tensor, StateT]:
        """Launch the exchange of the prepared rows; return the rows to come, not to be read yet."""

    def finish_dispatch(self, rows: Tensor, state: StateT) -> ExpertBatch:
        """Wait for the rows; return them as a batch for the experts of this rank."""

    def launch_combine(self, y: Tensor, state: StateT) -> Tensor:
        """Launch the exchange back of the outputs, one per row; return rows not to be read yet."""

    def finish_combine(self, rows: Tensor, state: StateT) -> Tensor:
        """Wait for the outputs and return the sum of each token's: [T, D]."""


AnyDispatcher: TypeAlias = Dispatcher[Any]
"""A dispatcher with any state: callers only hand it from one call to the next."""
MakeDispatcher = Callable[[ProcessGroup, int], Dispatcher[Any]]
"""A function that makes a dispatcher from the ranks and the number of experts."""


@runtime_checkable
class PreparesInTwo(Protocol[StartedT, StateT_co]):
    """A dispatcher whose `prepare` comes in two parts, cut where it would wait for other ranks.

    Work between the two parts overlaps with the exchange of counts. Every rank that has called
    the first must call the second.
    """

    def start_prepare(self, x: Tensor, experts: Tensor, weights: Tensor | None = None) -> StartedT:
        """Launch the exchange of counts, and sort meanwhile; takes the arguments of `prepare`."""

    def finish_prepare(self, started: StartedT) -> tuple[Tensor, StateT_co]:
        """Wait for the counts; returns and raises as `prepare`."""


@dataclass(frozen=True, slots=True, eq=False)
class DispatchState:
    """The state of one batch between its dispatch and its combine; read-only.

    Attributes:
        permutation: Permutation of the slots, or of (token, rank) pairs if rows are deduplicated,
            to the rows that this rank sends.
        weights: Routing weights of the slots sent; after the launch those of the slots received,
            possibly still on their way. None: all are one.
        order: Slot of the received rows at each position of expert order, int64; None if rows are
            deduplicated, whose codes give it.
        counts: Positions of each local expert, on the host; None if they stay on the device.
        num_tokens_per_expert: Positions of each local expert, on the device, int64 [L].
        input_splits: Number of rows sent to each rank.
        output_splits: Number of rows received from each rank.
        slots: Exchange of the slots of deduplicated rows; None: each row has one slot.
    """

    permutation: Permutation
    weights: Tensor | None
    order: Tensor | None
    counts: tuple[int, ...] | None
    num_tokens_per_expert: Tensor
    input_splits: tuple[int, ...] = ()
    output_splits: tuple[int, ...] = ()
    slots: SlotExchange | None = None


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
