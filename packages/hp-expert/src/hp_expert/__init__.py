"""Expert parallelism for mixture-of-experts models: stateless dispatch, one host read per layer."""

from hp_expert.batch import ExpertBatch
from hp_expert.checkpoint import (
    ExpertNames,
    StackedPart,
    expert_names,
    from_hf,
    load_experts,
    save_experts,
    stacked_parts,
    to_hf,
)
from hp_expert.dispatch import (
    AllToAllDispatcher,
    DispatchBytes,
    Dispatcher,
    DispatchState,
    LocalDispatcher,
    deduplication_pays,
    dispatch_bytes,
    expected_rows_per_token,
)
from hp_expert.experts import GroupedExperts, routed_swiglu
from hp_expert.moe import MoE
from hp_expert.permute import Permutation, gather_slots, sort_by_expert, sum_slots
from hp_expert.routing import (
    Routing,
    TopKRouter,
    check_replay,
    global_balance_loss,
    load_imbalance,
    register_correction_bias_update,
    router_z_loss,
    save_routing,
    sequence_balance_loss,
    take_loads,
    update_correction_biases,
)
from hp_expert.styles import (
    BaseExpertParallel,
    ExpertParallel,
    ExpertRanks,
    ExpertTensorParallel,
    TensorParallel,
)

__all__ = [
    "AllToAllDispatcher",
    "BaseExpertParallel",
    "DispatchBytes",
    "DispatchState",
    "Dispatcher",
    "ExpertBatch",
    "ExpertNames",
    "ExpertParallel",
    "ExpertRanks",
    "ExpertTensorParallel",
    "GroupedExperts",
    "LocalDispatcher",
    "MoE",
    "Permutation",
    "Routing",
    "StackedPart",
    "TensorParallel",
    "TopKRouter",
    "__version__",
    "check_replay",
    "deduplication_pays",
    "dispatch_bytes",
    "expected_rows_per_token",
    "expert_names",
    "from_hf",
    "gather_slots",
    "global_balance_loss",
    "load_experts",
    "load_imbalance",
    "register_correction_bias_update",
    "routed_swiglu",
    "router_z_loss",
    "save_experts",
    "save_routing",
    "sequence_balance_loss",
    "sort_by_expert",
    "stacked_parts",
    "sum_slots",
    "take_loads",
    "to_hf",
    "update_correction_biases",
]
__version__ = "0.1.0"
