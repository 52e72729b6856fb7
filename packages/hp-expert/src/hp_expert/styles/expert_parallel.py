"""Experts in equal runs, one run per rank."""

from collections.abc import Callable
from typing import Any, Literal

from torch.distributed import ProcessGroup

from hp_expert.dispatch import AllToAllDispatcher, Dispatcher, LocalDispatcher
from hp_expert.experts import GroupedExperts
from hp_expert.styles.base import DispatchedParallel
from hp_expert.styles.ranks import ExpertRanks
from hp_expert.styles.sharding import keep_part, require_divisible


class ExpertParallel(DispatchedParallel):
    """Each rank keeps an equal run of the experts; rows travel to them.

    Args:
        deduplicate: Whether a token is sent to a rank once, however many of its experts live
            there; see `AllToAllDispatcher`.
        dispatcher: Makes the dispatcher, from the group and the number of experts, if it is to be
            another one than `AllToAllDispatcher`.
    """

    def __init__(
        self,
        *,
        deduplicate: bool | Literal["auto"] = "auto",
        dispatcher: Callable[[ProcessGroup, int], Dispatcher[Any]] | None = None,
    ) -> None:
        self.deduplicate, self.dispatcher = deduplicate, dispatcher

    def validate(self, experts: GroupedExperts, ranks: ExpertRanks) -> None:
        """Refuse experts that cannot be cut into equal parts."""
        require_divisible(experts, ranks)

    def partition(self, experts: GroupedExperts, ranks: ExpertRanks) -> None:
        """Keep experts r * L .. (r + 1) * L - 1 on rank r, L = num_experts / size of the group."""
        keep_part(experts, ranks)

    def own_dispatcher(self, ranks: ExpertRanks, num_experts: int) -> Dispatcher[Any]:
        """Return what exchanges rows; a group of one exchanges nothing."""
        assert ranks.ep is not None
        if self.dispatcher is not None:
            return self.dispatcher(ranks.ep, num_experts)
        if ranks.ep_size == 1:
            return LocalDispatcher(num_experts)
        return AllToAllDispatcher(ranks.ep, num_experts, deduplicate=self.deduplicate)
