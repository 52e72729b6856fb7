"""Expert parallelism for mixture-of-experts models: stateless dispatch, one host read per layer."""

from hp_expert.batch import ExpertBatch, LocalRead
from hp_expert.checkpoint import ExpertNames, expert_names
from hp_expert.checkpoint.convert import from_hf, to_hf
from hp_expert.checkpoint.load import load_experts
from hp_expert.checkpoint.parts import StackedPart, stacked_parts
from hp_expert.checkpoint.save import save_experts
from hp_expert.data_parallel import (
    expert_parameter_names,
    fully_shard_experts,
    reduce_expert_gradients,
)
from hp_expert.dispatch import (
    AllToAllDispatcher,
    BoundedAllToAllDispatcher,
    BoundedState,
    BufferOverflowError,
    DispatchBytes,
    Dispatcher,
    DispatchState,
    ExchangeRead,
    LocalDispatcher,
    Mark,
    PreparesInTwo,
    RunAhead,
    SlicedState,
    SlotExchange,
    TensorSlicedDispatcher,
    TensorSummedDispatcher,
    deduplication_pays,
    dispatch_bytes,
    expected_rows_per_token,
    rows_per_pair,
)
from hp_expert.experts import (
    Activation,
    ClampedSwiGLU,
    GroupedExperts,
    GroupedProducts,
    SwiGLU,
    routed_swiglu,
    routed_swiglu_fused,
)
from hp_expert.gradients import clip_grad_norm_, grad_norm, shard_groups
from hp_expert.hugging_face import (
    RoutingRecord,
    apply_to_transformers,
    record_routing,
    register_with_transformers,
    replay_routing,
)
from hp_expert.moe import MoE
from hp_expert.permute import Permutation, gather_slots, sort_by_expert, sum_slots
from hp_expert.routing.balance import (
    document_balance_loss,
    global_balance_loss,
    router_z_loss,
    sequence_balance_loss,
)
from hp_expert.routing.correction import (
    load_imbalance,
    register_correction_bias_update,
    take_loads,
    update_correction_biases,
)
from hp_expert.routing.recompute import save_routing
from hp_expert.routing.router import Routing, TopKRouter, check_replay
from hp_expert.styles import BaseExpertParallel, DispatchedParallel
from hp_expert.styles.parallel import ExpertParallel, ExpertTensorParallel, TensorParallel
from hp_expert.styles.ranks import ExpertRanks

__all__ = [
    "Activation",
    "AllToAllDispatcher",
    "BaseExpertParallel",
    "BoundedAllToAllDispatcher",
    "BoundedState",
    "BufferOverflowError",
    "ClampedSwiGLU",
    "DispatchBytes",
    "DispatchState",
    "DispatchedParallel",
    "Dispatcher",
    "ExchangeRead",
    "ExpertBatch",
    "ExpertNames",
    "ExpertParallel",
    "ExpertRanks",
    "ExpertTensorParallel",
    "GroupedExperts",
    "GroupedProducts",
    "LocalDispatcher",
    "LocalRead",
    "Mark",
    "MoE",
    "Permutation",
    "PreparesInTwo",
    "Routing",
    "RoutingRecord",
    "RunAhead",
    "SlicedState",
    "SlotExchange",
    "StackedPart",
    "SwiGLU",
    "TensorParallel",
    "TensorSlicedDispatcher",
    "TensorSummedDispatcher",
    "TopKRouter",
    "__version__",
    "apply_to_transformers",
    "check_replay",
    "clip_grad_norm_",
    "deduplication_pays",
    "dispatch_bytes",
    "document_balance_loss",
    "expected_rows_per_token",
    "expert_names",
    "expert_parameter_names",
    "from_hf",
    "fully_shard_experts",
    "gather_slots",
    "global_balance_loss",
    "grad_norm",
    "load_experts",
    "load_imbalance",
    "record_routing",
    "reduce_expert_gradients",
    "register_correction_bias_update",
    "register_with_transformers",
    "replay_routing",
    "routed_swiglu",
    "routed_swiglu_fused",
    "router_z_loss",
    "rows_per_pair",
    "save_experts",
    "save_routing",
    "sequence_balance_loss",
    "shard_groups",
    "sort_by_expert",
    "stacked_parts",
    "sum_slots",
    "take_loads",
    "to_hf",
    "update_correction_biases",
]
__version__ = "0.1.0"
