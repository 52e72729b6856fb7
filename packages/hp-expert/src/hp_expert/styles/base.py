"""How experts are spread over ranks, as styles for torch's `parallelize_module`.

A style changes a module once: its parameters become this rank's part, and its dispatcher one that
reaches the others. It keeps nothing of any call.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from hp_expert.batch import ExpertBatch
from hp_expert.dispatch import Dispatcher
from hp_expert.experts import GroupedExperts
from hp_expert.placement import local_part
from hp_expert.styles.ranks import ExpertMesh, ExpertRanks
from hp_expert.styles.sharding import agree_on, shared_parameters


class BaseExpertParallel(ParallelStyle, ABC):
    """A way to spread experts over ranks: override `partition`, `dispatch` and `combine`.

    `dispatch` returns what `combine` will need, and nothing may be kept in the style instead: calls
    of several microbatches interleave. To launch and finish in separate steps, override
    `make_dispatcher` as well; for ranks of more than one axis, `resolve`.
    """

    def apply(self, module: nn.Module, mesh_or_group: ExpertMesh) -> nn.Module:
        """Spread the experts of a module, in place.

        Parameters may be on any device, the meta device included. Every rank keeps its part of
        what it has: nothing is sent but a description of the experts, on which all ranks agree.
        Layers that share a parameter share its part.

        Args:
            module: `GroupedExperts`, or a module that contains some, such as a `MoE`.
            mesh_or_group: The ranks, as `resolve` takes them. On a mesh parameters become
                DTensors, with a group they are plain tensors.

        Returns:
            `module`.

        Raises:
            ValueError: On every rank, if the experts cannot be spread over the ranks, have been
                before, differ between ranks, or the module has none; nothing has changed then.
            hp_platform.PeerError: On the others, if they cannot on one rank alone.
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
    ) -> tuple[list[Dispatcher[Any]], Exception | None]:
        """All of them or why there are none: what can be refused is, before anything changes."""
        try:
            for experts in _require_some(module, found):
                _require_whole(experts)
                self.validate(experts, ranks)
            return [self.make_dispatcher(experts, ranks) for experts in found], None
        except Exception as error:  # noqa: BLE001 - told to all ranks, then raised
            return [], error

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Return what torch's `parallelize_module` calls."""
        return self.apply(module, device_mesh)

    def resolve(self, mesh_or_group: ExpertMesh) -> ExpertRanks:
        """Return which ranks share experts; by default those of a group or a mesh of one axis."""
        return ExpertRanks.along("ep", mesh_or_group)

    def validate(self, experts: GroupedExperts, ranks: ExpertRanks) -> None:
        """Raise ValueError if the experts cannot be spread so; by default they can."""

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
            What this rank's experts compute on, and what `combine` needs to know.
        """

    @abstractmethod
    def combine(self, y: Tensor, state: Any, *, ranks: ExpertRanks, num_experts: int) -> Tensor:
        """Bring the outputs of the batch's rows back and sum those of each token: [T, D]."""

    def make_dispatcher(self, experts: GroupedExperts, ranks: ExpertRanks) -> Dispatcher[Any]:
        """Return the dispatcher of a module; by default one that calls `dispatch` and `combine`."""
        return _StyleDispatcher(self, ranks, experts.num_experts)


class DispatchedParallel(BaseExpertParallel):
    """A style whose `dispatch` and `combine` are those of a dispatcher, unless overridden."""

    @abstractmethod
    def own_dispatcher(self, ranks: ExpertRanks, num_experts: int) -> Dispatcher[Any]:
        """Return the dispatcher."""

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
        """Return a dispatcher of four calls, or of two if a subclass overrides one of them."""
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
    """What travels with a call: first its routing, then its batch and the style's own state."""

    experts: Tensor
    weights: Tensor | None
    batch: ExpertBatch | None = None
    own: Any = None


@dataclass(frozen=True, slots=True)
class _StyleDispatcher:
    """The calls of a dispatcher from the two of a style: the launches do all the work."""

    style: BaseExpertParallel
    ranks: ExpertRanks
    num_experts: int

    def __deepcopy__(self, memo: dict[int, Any]) -> "_StyleDispatcher":
        return self

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
