"""All experts on every rank, a part of their hidden dim on each."""

from typing import Any

from hp_expert.dispatch import Dispatcher, LocalDispatcher
from hp_expert.dispatch.tensor_summed import TensorSummedDispatcher
from hp_expert.experts import GroupedExperts
from hp_expert.styles.base import DispatchedParallel
from hp_expert.styles.ranks import ExpertMesh, ExpertRanks
from hp_expert.styles.sharding import keep_part, require_divisible


class TensorParallel(DispatchedParallel):
    """Each rank keeps a part of every expert's hidden dim; nothing is dispatched.

    All ranks pass the same tokens and get the same outputs, complete: they are summed over the
    ranks in forward, and the gradients of tokens and routing weights in backward.
    """

    def resolve(self, mesh_or_group: ExpertMesh) -> ExpertRanks:
        """Return the ranks of a group or a mesh of one axis."""
        return ExpertRanks.along("tp", mesh_or_group)

    def validate(self, experts: GroupedExperts, ranks: ExpertRanks) -> None:
        """Refuse a hidden dim that cannot be cut into equal parts."""
        require_divisible(experts, ranks)

    def partition(self, experts: GroupedExperts, ranks: ExpertRanks) -> None:
        """Keep a part of the rows of w1 and w3 and of the columns of w2."""
        keep_part(experts, ranks)

    def own_dispatcher(self, ranks: ExpertRanks, num_experts: int) -> Dispatcher[Any]:
        """Return what sums over the ranks."""
        assert ranks.tp is not None
        if ranks.tp_size == 1:
            return LocalDispatcher(num_experts)
        return TensorSummedDispatcher(ranks.tp, num_experts)
