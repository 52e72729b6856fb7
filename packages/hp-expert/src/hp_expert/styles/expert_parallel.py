"""Experts in equal runs, one run per rank."""

from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hp_expert.batch import ExpertBatch
from hp_expert.dispatch import AllToAllDispatcher, Dispatcher, LocalDispatcher
from hp_expert.experts import GroupedExperts
from hp_expert.styles.base import BaseExpertParallel


class ExpertParallel(BaseExpertParallel):
    """Each rank keeps an equal run of the experts; rows travel by all-to-all."""

    def partition(self, experts: GroupedExperts, group: ProcessGroup) -> None:
        """Keep experts r * L .. (r + 1) * L - 1 on rank r, L = num_experts / size of the group."""
        num_local = experts.num_experts // group.size()
        first = group.rank() * num_local
        for name, parameter in list(experts.named_parameters(recurse=False)):
            # A copy, so that the whole parameter can be freed.
            mine = parameter.detach()[first : first + num_local].clone()
            setattr(experts, name, nn.Parameter(mine, requires_grad=parameter.requires_grad))
        experts.first_expert = first

    def dispatch(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor | None,
        *,
        group: ProcessGroup,
        num_experts: int,
    ) -> tuple[ExpertBatch, Any]:
        """Exchange rows; see `BaseExpertParallel.dispatch`."""
        dispatcher = AllToAllDispatcher(group, num_experts)
        rows, state = dispatcher.launch_dispatch(*dispatcher.prepare(x, experts, weights))
        return dispatcher.finish_dispatch(rows, state), state

    def combine(self, y: Tensor, state: Any, *, group: ProcessGroup, num_experts: int) -> Tensor:
        """Exchange back and sum; see `BaseExpertParallel.combine`."""
        dispatcher = AllToAllDispatcher(group, num_experts)
        return dispatcher.finish_combine(dispatcher.launch_combine(y, state), state)

    def make_dispatcher(self, experts: GroupedExperts, group: ProcessGroup) -> Dispatcher[Any]:
        """Return a dispatcher of four calls, or of two if a subclass overrides one of them."""
        dispatcher = AllToAllDispatcher(group, experts.num_experts)
        kind = type(self)
        if (kind.dispatch, kind.combine) != (ExpertParallel.dispatch, ExpertParallel.combine):
            return super().make_dispatcher(experts, group)
        return LocalDispatcher(experts.num_experts) if group.size() == 1 else dispatcher
