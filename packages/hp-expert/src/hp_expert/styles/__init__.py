"""Styles that spread experts over ranks, for torch's `parallelize_module`.

A style changes a module once: its parameters become this rank's part, and its dispatcher one that
reaches the other ranks. A style keeps nothing of a call.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from hp_expert.batch import ExpertBatch, LocalDispatcher, SharesGroups
from hp_expert.dispatch import AnyDispatcher, Dispatcher, MakeDispatcher
from hp_expert.dispatch.all_to_all import AllToAllDispatcher
from hp_expert.dispatch.tensor_sliced import TensorSlicedDispatcher
from hp_expert.dispatch.tensor_summed import TensorSummedDispatcher
from hp_expert.experts.module import GroupedExperts
from hp_expert.placement import ExpertMesh, ExpertRanks, local_part
from hp_expert.styles.sharding import agree_on, keep_part, require_divisible, shared_parameters


class BaseExpertParallel(ParallelStyle, ABC):
    """A way to spread experts over ranks: override `partition`, `dispatch` and `combine`.

    `dispatch` returns a state for `combine`; the style itself must keep nothing of a call, as calls
    of several microbatches interleave. To launch and finish in separate steps, override
    `make_dispatcher` as well; for ranks of more than one axis, override `resolve`.
    """

    def apply(self, module: nn.Module, mesh_or_group: ExpertMesh) -> nn.Module:
        """Spread the experts of a module, in place.

        Parameters may be on any device, the meta device included. Every rank keeps its part of its
        own parameters: ranks exchange only a description of the experts, which must be the same on
        all of them. Layers that share a parameter share its part.

        Args:
            module: `GroupedExperts`, or a module that contains some, such as a `MoE`.
            mesh_or_group: The ranks, as `resolve` takes them. On a mesh parameters become
                DTensors, with a group they are plain tensors.

        Returns:
            `module`.

        Raises:
            ValueError: On every rank, if the experts cannot be spread over the ranks, have been
                spread before, differ between ranks, or the module has none; nothing has changed
                then.
            hp_platform.PeerError: On the other ranks, if it is so on one rank only.
        """
        ranks = self.resolve(mesh_or_group)
        found = [part for part in module.modules() if isinstance(part, GroupedExperts)]
        dispatchers, error = self._dispatchers(module, found, ranks)
        agree_on(found, error, ranks)
        shared = shared_parameters(found)
        for experts, dispatcher in zip(found, dispatchers, strict=True):
            self.partition(experts, ranks)
            experts.num_local_experts = local_part(experts.w1).shape[0]
            experts.ranks = ranks
            experts.dispatcher = dispatcher
        for (first, name), *others in shared:
            for experts, other in others:
                setattr(experts, other, getattr(first, name))
        return module

    def _dispatchers(
        self, module: nn.Module, found: list[GroupedExperts], ranks: ExpertRanks
    ) -> tuple[list[AnyDispatcher], Exception | None]:
        """Return all dispatchers, or the error to tell all ranks before anything changes."""
        try:
            for experts in _require_some(module, found):
                _require_whole(experts)
                self.validate(experts, ranks)
            return [self.make_dispatcher(experts, ranks) for experts in found], None
        except Exception as error:  # noqa: BLE001 - told to all ranks, then raised
            return [], error

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Apply the style, as torch's `parallelize_module` calls it."""
        return self.apply(module, device_mesh)

    def resolve(self, mesh_or_group: ExpertMesh) -> ExpertRanks:
        """Return the ranks that share experts; by default those of a group or a one-axis mesh."""
        return ExpertRanks.along("ep", mesh_or_group)

    def validate(self, experts: GroupedExperts, ranks: ExpertRanks) -> None:
        """Raise ValueError if experts cannot be spread over these ranks; by default they can."""

    @abstractmethod
    def partition(self, experts: GroupedExperts, ranks: ExpertRanks) -> None:
        """Keep this rank's part of the parameters."""

    @abstractmethod
    def dispatch(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor | None,
        *,
        ranks: ExpertRanks,
        num_experts: int,
    ) -> tuple[ExpertBatch, Any]:
        """Bring rows to their experts; see `Dispatcher.prepare` for the arguments.

        Returns:
            The batch for the experts of this rank, and the state for `combine`.
        """

    @abstractmethod
    def combine(self, y: Tensor, state: Any, *, ranks: ExpertRanks, num_experts: int) -> Tensor:
        """Bring the outputs of the batch's rows back and sum those of each token: [T, D]."""

    def make_dispatcher(self, experts: GroupedExperts, ranks: ExpertRanks) -> Dispatcher[Any]:
        """Return the dispatcher of a module; by default one that calls `dispatch` and `combine`."""
        return _StyleDispatcher(self, ranks, experts.num_experts)


class DispatchedParallel(BaseExpertParallel):
    """A style that leaves each rank an equal part of the experts, and exchanges by a dispatcher."""

    @abstractmethod
    def own_dispatcher(self, ranks: ExpertRanks, num_experts: int) -> Dispatcher[Any]:
        """Return the dispatcher for these ranks."""

    def validate(self, experts: GroupedExperts, ranks: ExpertRanks) -> None:
        """Raise ValueError for experts that cannot be cut into equal parts."""
        require_divisible(experts, ranks)

    def partition(self, experts: GroupedExperts, ranks: ExpertRanks) -> None:
        """Keep this rank's part: of the experts along ep, of their hidden dim along tp."""
        keep_part(experts, ranks)

    def dispatch(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor | None,
        *,
        ranks: ExpertRanks,
        num_experts: int,
    ) -> tuple[ExpertBatch, Any]:
        """Bring rows to their experts; see `BaseExpertParallel.dispatch`."""
        dispatcher = self.own_dispatcher(ranks, num_experts)
        rows, state = dispatcher.launch_dispatch(*dispatcher.prepare(x, experts, weights))
        return dispatcher.finish_dispatch(rows, state), state

    def combine(self, y: Tensor, state: Any, *, ranks: ExpertRanks, num_experts: int) -> Tensor:
        """Bring the outputs back and sum; see `BaseExpertParallel.combine`."""
        dispatcher = self.own_dispatcher(ranks, num_experts)
        return dispatcher.finish_combine(dispatcher.launch_combine(y, state), state)

    def make_dispatcher(self, experts: GroupedExperts, ranks: ExpertRanks) -> Dispatcher[Any]:
        """Return `own_dispatcher`, or one of `dispatch` and `combine` if either is overridden."""
        kind, base = type(self), DispatchedParallel
        if (kind.dispatch, kind.combine) != (base.dispatch, base.combine):
            return super().make_dispatcher(experts, ranks)
        return self.own_dispatcher(ranks, experts.num_experts)


def _require_some(module: nn.Module, found: list[GroupedExperts]) -> list[GroupedExperts]:
    if not found:
        raise ValueError(f"module ({type(module).__name__}) must contain GroupedExperts")
    return found


def _require_whole(experts: GroupedExperts) -> None:
    if experts.ranks is not None:
        raise ValueError(f"experts ({experts}) must be spread over ranks only once")
    sharded = [n for n, p in experts.named_parameters(recurse=False) if isinstance(p, DTensor)]
    if sharded:
        raise ValueError(f"parameters ({sharded}) must be no DTensors before they are spread")


@dataclass(frozen=True, slots=True, eq=False)
class _StyleState:
    """The state of a call: its routing before the launch, then its batch and the style's state."""

    experts: Tensor
    weights: Tensor | None
    batch: ExpertBatch | None = None
    own: object = None


@dataclass(frozen=True, slots=True)
class _StyleDispatcher(SharesGroups):
    """The dispatcher of a style's `dispatch` and `combine`, which run in the two launches."""

    style: BaseExpertParallel
    ranks: ExpertRanks
    num_experts: int

    def prepare(
        self, x: Tensor, experts: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, _StyleState]:
        return x, _StyleState(experts, weights)

    def launch_dispatch(self, rows: Tensor, state: _StyleState) -> tuple[Tensor, _StyleState]:
        batch, own = self.style.dispatch(
            rows, state.experts, state.weights, ranks=self.ranks, num_experts=self.num_experts
        )
        return batch.rows, replace(state, batch=batch, own=own)

    def finish_dispatch(self, rows: Tensor, state: _StyleState) -> ExpertBatch:
        assert state.batch is not None
        return state.batch._replace(rows=rows)

    def launch_combine(self, y: Tensor, state: _StyleState) -> Tensor:
        return self.style.combine(y, state.own, ranks=self.ranks, num_experts=self.num_experts)

    def finish_combine(self, rows: Tensor, state: _StyleState) -> Tensor:
        del state
        return rows


class ExpertParallel(DispatchedParallel):
    """Each rank keeps an equal run of the experts; rows are sent to them.

    Args:
        deduplicate: Whether a token is sent to a rank once, however many of the token's experts
            are there; see `AllToAllDispatcher`.
        dispatcher: Function that makes the dispatcher from the group and the number of experts;
            None: an `AllToAllDispatcher`.
    """

    def __init__(
        self,
        *,
        deduplicate: bool | Literal["auto"] = "auto",
        dispatcher: MakeDispatcher | None = None,
    ) -> None:
        self.deduplicate, self.dispatcher = deduplicate, dispatcher

    def own_dispatcher(self, ranks: ExpertRanks, num_experts: int) -> Dispatcher[Any]:
        """Return the dispatcher that exchanges rows; a group of one rank exchanges nothing."""
        if self.dispatcher is not None and ranks.ep is not None:
            return self.dispatcher(ranks.ep, num_experts)
        return _dispatcher_of(ranks, num_experts, deduplicate=self.deduplicate)


class TensorParallel(DispatchedParallel):
    """Each rank keeps a part of every expert's hidden dim; no rows are sent.

    All ranks pass the same tokens and get the same outputs, complete: outputs are summed over the
    ranks in forward, and the gradients of tokens and routing weights in backward.
    """

    def resolve(self, mesh_or_group: ExpertMesh) -> ExpertRanks:
        """Return the ranks of a group or a mesh of one axis."""
        return ExpertRanks.along("tp", mesh_or_group)

    def own_dispatcher(self, ranks: ExpertRanks, num_experts: int) -> Dispatcher[Any]:
        """Return the dispatcher that sums over the ranks; a group of one rank sums nothing."""
        return _dispatcher_of(ranks, num_experts)


class ExpertTensorParallel(DispatchedParallel):
    """Each rank keeps a run of the experts and a part of their hidden dim.

    The ranks of a tp group pass the same tokens and get the same outputs, complete. Each of them
    sends a slice of the tokens to the experts' ranks, where the slices are gathered.

    Args:
        ep: Name of the mesh axis of ranks with other experts.
        tp: Name of the mesh axis of ranks with other parts of the hidden dim.
        sliced: Whether the ranks of a tp group pass different tokens instead, and each gets the
            outputs of its own, as in sequence parallelism.
        deduplicate: Whether a token is sent to a rank once, however many of the token's experts
            are there; see `AllToAllDispatcher`.
    """

    def __init__(
        self,
        *,
        ep: str = "ep",
        tp: str = "tp",
        sliced: bool = False,
        deduplicate: bool | Literal["auto"] = "auto",
    ) -> None:
        self.ep, self.tp, self.sliced, self.deduplicate = ep, tp, sliced, deduplicate

    def resolve(self, mesh_or_group: ExpertMesh) -> ExpertRanks:
        """Return the ranks of a mesh with axes `ep` and `tp`, or of two groups in this order."""
        return ExpertRanks.of_two_axes(mesh_or_group, ep=self.ep, tp=self.tp)

    def own_dispatcher(self, ranks: ExpertRanks, num_experts: int) -> Dispatcher[Any]:
        """Return the dispatcher over both axes; along an axis of one rank nothing is exchanged."""
        return _dispatcher_of(ranks, num_experts, deduplicate=self.deduplicate, sliced=self.sliced)


def _dispatcher_of(
    ranks: ExpertRanks,
    num_experts: int,
    *,
    deduplicate: bool | Literal["auto"] = "auto",
    sliced: bool = False,
) -> AnyDispatcher:
    """Return the dispatcher over the axes of more than one rank."""
    if ranks.tp_size == ranks.ep_size == 1:
        return LocalDispatcher(num_experts)
    if ranks.tp is not None and ranks.ep_size == 1 and not sliced:
        return TensorSummedDispatcher(ranks.tp, num_experts)
    assert ranks.ep is not None
    over_ep = AllToAllDispatcher(ranks.ep, num_experts, deduplicate=deduplicate)
    if ranks.tp is None or ranks.tp_size == 1:
        return over_ep
    return TensorSlicedDispatcher(over_ep, ranks.tp, sliced=sliced)
