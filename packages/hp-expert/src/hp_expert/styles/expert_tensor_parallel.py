"""Experts in runs over one axis of ranks, their hidden dim over the other."""

from typing import Any, Literal

from hp_expert.dispatch import AllToAllDispatcher, Dispatcher, LocalDispatcher
from hp_expert.dispatch.tensor_sliced import TensorSlicedDispatcher
from hp_expert.dispatch.tensor_summed import TensorSummedDispatcher
from hp_expert.experts import GroupedExperts
from hp_expert.styles.base import DispatchedParallel
from hp_expert.styles.ranks import ExpertMesh, ExpertRanks
from hp_expert.styles.sharding import keep_part, require_divisible


class ExpertTensorParallel(DispatchedParallel):
    """Each rank keeps a run of the experts and a part of their hidden dim.

    The ranks of a tp group pass the same tokens and get the same outputs, complete. Each of them
    sends a slice of the tokens to the experts' ranks, where the slices meet again.

    Args:
        ep: Name of the mesh axis that has other experts.
        tp: Name of the mesh axis that has other parts of the hidden dim.
        sliced: Whether the ranks of a tp group pass different tokens instead, and each gets the
            outputs of its own, as in sequence parallelism.
        deduplicate: Whether a token is sent to a rank once, however many of its experts live
            there; see `AllToAllDispatcher`.
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

    def validate(self, experts: GroupedExperts, ranks: ExpertRanks) -> None:
        """Refuse experts that cannot be cut into equal parts."""
        require_divisible(experts, ranks)

    def partition(self, experts: GroupedExperts, ranks: ExpertRanks) -> None:
        """Keep a run of the experts, and of them a part of the hidden dim."""
        keep_part(experts, ranks)

    def own_dispatcher(self, ranks: ExpertRanks, num_experts: int) -> Dispatcher[Any]:
        """Return what exchanges rows; along an axis of one rank nothing is."""
        assert ranks.ep is not None
        assert ranks.tp is not None
        if ranks.tp_size == ranks.ep_size == 1:
            return LocalDispatcher(num_experts)
        if ranks.ep_size == 1 and not self.sliced:
            return TensorSummedDispatcher(ranks.tp, num_experts)
        over_ep = AllToAllDispatcher(ranks.ep, num_experts, deduplicate=self.deduplicate)
        if ranks.tp_size == 1:
            return over_ep
        return TensorSlicedDispatcher(over_ep, ranks.tp, sliced=self.sliced)
