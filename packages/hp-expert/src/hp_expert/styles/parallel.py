"""The styles: experts in runs over ranks, their hidden dim over ranks, or both."""

from typing import Any, Literal

from hp_expert.batch import LocalDispatcher
from hp_expert.dispatch import Dispatcher, MakeDispatcher
from hp_expert.dispatch.all_to_all import AllToAllDispatcher
from hp_expert.dispatch.tensor_sliced import TensorSlicedDispatcher
from hp_expert.dispatch.tensor_summed import TensorSummedDispatcher
from hp_expert.styles import DispatchedParallel
from hp_expert.styles.ranks import ExpertMesh, ExpertRanks


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
        assert ranks.ep is not None
        if self.dispatcher is not None:
            return self.dispatcher(ranks.ep, num_experts)
        if ranks.ep_size == 1:
            return LocalDispatcher(num_experts)
        return AllToAllDispatcher(ranks.ep, num_experts, deduplicate=self.deduplicate)


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
        assert ranks.tp is not None
        if ranks.tp_size == 1:
            return LocalDispatcher(num_experts)
        return TensorSummedDispatcher(ranks.tp, num_experts)


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
