"""Expert parallelism for mixture-of-experts models: stateless dispatch, one host read per layer."""

from hp_expert.all_to_all import AllToAllDispatcher
from hp_expert.batch import ExpertBatch
from hp_expert.dispatch import Dispatcher, DispatchState, LocalDispatcher
from hp_expert.experts import GroupedExperts
from hp_expert.moe import MoE
from hp_expert.permute import Permutation, gather_slots, sort_by_expert, sum_slots
from hp_expert.routing import Routing, TopKRouter, sequence_balance_loss
from hp_expert.styles import BaseExpertParallel, ExpertParallel
from hp_expert.swiglu import routed_swiglu

__all__ = [
    "AllToAllDispatcher",
    "BaseExpertParallel",
    "DispatchState",
    "Dispatcher",
    "ExpertBatch",
    "ExpertParallel",
    "GroupedExperts",
    "LocalDispatcher",
    "MoE",
    "Permutation",
    "Routing",
    "TopKRouter",
    "__version__",
    "gather_slots",
    "routed_swiglu",
    "sequence_balance_loss",
    "sort_by_expert",
    "sum_slots",
]
__version__ = "0.1.0"
