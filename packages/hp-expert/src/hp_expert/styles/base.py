"""How experts are spread over ranks, as styles for torch's `parallelize_module`.

A style changes a module once: its parameters become this rank's part, and its dispatcher one that
reaches the others. It keeps nothing of any call.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from hp_expert.batch import ExpertBatch
from hp_expert.dispatch import Dispatcher
from hp_expert.experts import GroupedExperts
from hp_platform import resolve_group


class BaseExpertParallel(ParallelStyle, ABC):
    """A way to spread experts over ranks: override `partition`, `dispatch` and `combine`.

    `dispatch` returns what `combine` will need, and nothing may be kept in the style instead: calls
    of several microbatches interleave. To launch and finish in separate steps, override
    `make_dispatcher` as well.
    """

    def apply(self, module: nn.Module, mesh_or_group: DeviceMesh | ProcessGroup) -> nn.Module:
        """Spread the experts of a module, in place.

        Parameters may be on any device, the meta device included.

        Args:
            module: `GroupedExperts`, or a module that contains some, such as a `MoE`.
            mesh_or_group: The ranks: a one-dimensional mesh or a group.

        Returns:
            `module`.

        Raises:
            ValueError: On every rank, if the experts cannot be spread over the ranks, have been
                before, or the module has none.
        """
        group = resolve_group(mesh_or_group)
        found = [part for part in module.modules() if isinstance(part, GroupedExperts)]
        if not found:
            raise ValueError(f"module ({type(module).__name__}) must contain GroupedExperts")
        spread = [e for e in found if e.num_local_experts != e.num_experts]
        if spread:
            raise ValueError(f"experts ({spread[0]}) must be spread over ranks only once")
        # All of them or none: what can be refused is refused before anything changes.
        dispatchers = [self.make_dispatcher(experts, group) for experts in found]
        for experts, dispatcher in zip(found, dispatchers, strict=True):
            self.partition(experts, group)
            experts.dispatcher = dispatcher
        return module

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """What torch's `parallelize_module` calls."""
        return self.apply(module, device_mesh)

    @abstractmethod
    def partition(self, experts: GroupedExperts, group: ProcessGroup) -> None:
        """Keep this rank's part of the parameters."""

    @abstractmethod
    def dispatch(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor | None,
        *,
        group: ProcessGroup,
        num_experts: int,
    ) -> tuple[ExpertBatch, Any]:
        """Bring rows to their experts; see `Dispatcher.prepare` for the arguments.

        Returns:
            What this rank's experts compute on, and what `combine` needs to know.
        """

    @abstractmethod
    def combine(self, y: Tensor, state: Any, *, group: ProcessGroup, num_experts: int) -> Tensor:
        """Bring the outputs of the batch's rows back and sum those of each token: [T, D]."""

    def make_dispatcher(self, experts: GroupedExperts, group: ProcessGroup) -> Dispatcher[Any]:
        """Return the dispatcher of a module; by default one that calls `dispatch` and `combine`."""
        return _StyleDispatcher(self, group, experts.num_experts)


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
    group: ProcessGroup
    num_experts: int

    def __deepcopy__(self, memo: dict[int, Any]) -> "_StyleDispatcher":
        return self

    def prepare(
        self, x: Tensor, experts: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, _StyleState]:
        return x, _StyleState(experts, weights)

    def launch_dispatch(self, rows: Tensor, state: _StyleState) -> tuple[Tensor, _StyleState]:
        batch, own = self.style.dispatch(
            rows, state.experts, state.weights, group=self.group, num_experts=self.num_experts
        )
        return batch.rows, replace(state, batch=batch, own=own)

    def finish_dispatch(self, rows: Tensor, state: _StyleState) -> ExpertBatch:
        assert state.batch is not None
        return state.batch._replace(rows=rows)

    def launch_combine(self, y: Tensor, state: _StyleState) -> Tensor:
        return self.style.combine(y, state.own, group=self.group, num_experts=self.num_experts)

    def finish_combine(self, rows: Tensor, state: _StyleState) -> Tensor:
        del state
        return rows
