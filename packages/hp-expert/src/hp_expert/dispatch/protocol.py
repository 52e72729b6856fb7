"""Bringing rows to the ranks of their experts and back, in calls that keep no state.

Note [State travels with the call]. A dispatcher is a value without memory: what a later call must
know is in the `DispatchState` that the earlier one returned. So any number of microbatches may be
between their dispatch and their combine, in any threads, and a recompute disturbs nobody.

Note [Launches are nothing but exchanges]. Between its first argument and its first result, a launch
is one lazy all-to-all: nobody has waited for its result, nor in backward for the gradient of its
argument. What runs next, in either direction, overlaps with the exchange. This is why rows are
sorted and gathered before, in `prepare`, and summed after, in `finish_combine`.

Shape symbols: T tokens, K experts per token, S = T * K slots, E experts, L local experts, R rows
received, D width.
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor

from hp_expert.batch import ExpertBatch
from hp_expert.dispatch.deduplicated import SlotExchange
from hp_expert.permute import Permutation

StartedT = TypeVar("StartedT")
StateT = TypeVar("StateT")
StateT_co = TypeVar("StateT_co", covariant=True)


class Dispatcher(Protocol[StateT]):
    """Four calls that carry rows to their experts and back, after one that prepares them.

    They are called in this order for one batch; calls for several batches may interleave. A module
    uses whatever `GroupedExperts.dispatcher` is.
    """

    def prepare(
        self, x: Tensor, experts: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, StateT]:
        """Check and sort.

        Args:
            x: Tokens [T, D].
            experts: The experts of each, int64 [T, K]; -1 for a slot that was dropped: it goes
                nowhere, counts nothing, and its weight gets a gradient of exactly 0.
            weights: What each expert's output counts [T, K]; None: one.

        Returns:
            Rows to send, and what the other calls need to know.

        Raises:
            ValueError: If the input is wrong.
            hp_platform.PeerError: If that of another rank is.
        """

    def launch_dispatch(self, rows: Tensor, state: StateT) -> tuple[Tensor, StateT]:
        """Send the prepared rows off; return those on their way here, not to be read yet."""

    def finish_dispatch(self, rows: Tensor, state: StateT) -> ExpertBatch:
        """Wait for the rows and say which experts take them."""

    def launch_combine(self, y: Tensor, state: StateT) -> Tensor:
        """Send the experts' outputs, one for each row of the batch, back; not to be read yet."""

    def finish_combine(self, rows: Tensor, state: StateT) -> Tensor:
        """Wait for the outputs and sum those of each token: [T, D]."""


@runtime_checkable
class PreparesInTwo(Protocol[StartedT, StateT_co]):
    """A dispatcher whose `prepare` may be cut in two where it would wait for another rank.

    What runs between the two halves overlaps with the exchange of counts. Every rank that has
    started must finish.
    """

    def start_prepare(self, x: Tensor, experts: Tensor, weights: Tensor | None = None) -> StartedT:
        """Launch the exchange of counts and do what needs none; arguments of `prepare`."""

    def finish_prepare(self, started: StartedT) -> tuple[Tensor, StateT_co]:
        """Wait for the counts; return and raise what `prepare` does."""


@dataclass(frozen=True, slots=True, eq=False)
class DispatchState:
    """What one batch's dispatch tells its combine. All of it is read-only.

    Attributes:
        permutation: Which rows this rank sends, and whose they are.
        weights: Routing weights: [T, K] where tokens stay; of the slots sent before the launch
            where they leave, and after it of those received, possibly still on their way.
        order: Slot of the arrived rows at each position of expert order, int64; None where it
            comes with the rows.
        counts: Positions of each local expert, on the host; None if they stay on the device.
        num_tokens_per_expert: The same on the device, int64 [L].
        input_splits: Rows sent to each rank.
        output_splits: Rows received from each rank.
        slots: What travels with rows that are deduplicated.
    """

    permutation: Permutation
    weights: Tensor | None
    order: Tensor | None
    counts: tuple[int, ...] | None
    num_tokens_per_expert: Tensor
    input_splits: tuple[int, ...] = ()
    output_splits: tuple[int, ...] = ()
    slots: SlotExchange | None = None
