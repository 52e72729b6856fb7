"""Expert parallelism for mixture-of-experts models: stateless dispatch, one host read per layer.

A public name loads its module when it is used first.
"""

from typing import TYPE_CHECKING

from hp_base.lazy import lazily

if TYPE_CHECKING:
    from hp_expert.batch import ExpertBatch, LocalDispatcher, LocalRead
    from hp_expert.checkpoint import ExpertNames, expert_names
    from hp_expert.checkpoint.load import load_experts
    from hp_expert.checkpoint.parts import StackedPart, from_hf, stacked_parts, to_hf
    from hp_expert.checkpoint.save import save_experts
    from hp_expert.dispatch import Dispatcher, DispatchState, PreparesInTwo
    from hp_expert.dispatch.all_to_all import AllToAllDispatcher
    from hp_expert.dispatch.bounded import (
        BoundedAllToAllDispatcher,
        BoundedState,
        BufferOverflowError,
        Mark,
        RunAhead,
        rows_per_pair,
    )
    from hp_expert.dispatch.deduplicated import (
        DispatchBytes,
        SlotExchange,
        deduplication_pays,
        dispatch_bytes,
        expected_rows_per_token,
    )
    from hp_expert.dispatch.exchange_plan import ExchangeRead
    from hp_expert.dispatch.tensor_sliced import SlicedState, TensorSlicedDispatcher
    from hp_expert.dispatch.tensor_summed import TensorSummedDispatcher
    from hp_expert.experts.activation import Activation, ClampedSwiGLU, SwiGLU
    from hp_expert.experts.grouped import GroupedProducts
    from hp_expert.experts.module import GroupedExperts, SpreadExperts
    from hp_expert.experts.swiglu import routed_swiglu, routed_swiglu_fused
    from hp_expert.gradients import (
        clip_grad_norm_,
        expert_parameter_names,
        fully_shard_experts,
        grad_norm,
        reduce_expert_gradients,
        shard_groups,
    )
    from hp_expert.hugging_face.apply import apply_to_transformers, register_with_transformers
    from hp_expert.hugging_face.replay import RoutingRecord, record_routing, replay_routing
    from hp_expert.moe import MoE
    from hp_expert.permute import Permutation, gather_slots, sort_by_expert, sum_slots
    from hp_expert.placement import ExpertRanks
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
    from hp_expert.styles import (
        BaseExpertParallel,
        DispatchedParallel,
        ExpertParallel,
        ExpertTensorParallel,
        TensorParallel,
    )

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
    "SpreadExperts",
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

__getattr__, __dir__ = lazily(
    __name__,
    {
        "Activation": "hp_expert.experts.activation",
        "AllToAllDispatcher": "hp_expert.dispatch.all_to_all",
        "BaseExpertParallel": "hp_expert.styles",
        "BoundedAllToAllDispatcher": "hp_expert.dispatch.bounded",
        "BoundedState": "hp_expert.dispatch.bounded",
        "BufferOverflowError": "hp_expert.dispatch.bounded",
        "ClampedSwiGLU": "hp_expert.experts.activation",
        "DispatchBytes": "hp_expert.dispatch.deduplicated",
        "DispatchState": "hp_expert.dispatch",
        "DispatchedParallel": "hp_expert.styles",
        "Dispatcher": "hp_expert.dispatch",
        "ExchangeRead": "hp_expert.dispatch.exchange_plan",
        "ExpertBatch": "hp_expert.batch",
        "ExpertNames": "hp_expert.checkpoint",
        "ExpertParallel": "hp_expert.styles",
        "ExpertRanks": "hp_expert.placement",
        "ExpertTensorParallel": "hp_expert.styles",
        "GroupedExperts": "hp_expert.experts.module",
        "GroupedProducts": "hp_expert.experts.grouped",
        "LocalDispatcher": "hp_expert.batch",
        "LocalRead": "hp_expert.batch",
        "Mark": "hp_expert.dispatch.bounded",
        "MoE": "hp_expert.moe",
        "Permutation": "hp_expert.permute",
        "PreparesInTwo": "hp_expert.dispatch",
        "Routing": "hp_expert.routing.router",
        "RoutingRecord": "hp_expert.hugging_face.replay",
        "RunAhead": "hp_expert.dispatch.bounded",
        "SlicedState": "hp_expert.dispatch.tensor_sliced",
        "SlotExchange": "hp_expert.dispatch.deduplicated",
        "SpreadExperts": "hp_expert.experts.module",
        "StackedPart": "hp_expert.checkpoint.parts",
        "SwiGLU": "hp_expert.experts.activation",
        "TensorParallel": "hp_expert.styles",
        "TensorSlicedDispatcher": "hp_expert.dispatch.tensor_sliced",
        "TensorSummedDispatcher": "hp_expert.dispatch.tensor_summed",
        "TopKRouter": "hp_expert.routing.router",
        "apply_to_transformers": "hp_expert.hugging_face.apply",
        "check_replay": "hp_expert.routing.router",
        "clip_grad_norm_": "hp_expert.gradients",
        "deduplication_pays": "hp_expert.dispatch.deduplicated",
        "dispatch_bytes": "hp_expert.dispatch.deduplicated",
        "document_balance_loss": "hp_expert.routing.balance",
        "expected_rows_per_token": "hp_expert.dispatch.deduplicated",
        "expert_names": "hp_expert.checkpoint",
        "expert_parameter_names": "hp_expert.gradients",
        "from_hf": "hp_expert.checkpoint.parts",
        "fully_shard_experts": "hp_expert.gradients",
        "gather_slots": "hp_expert.permute",
        "global_balance_loss": "hp_expert.routing.balance",
        "grad_norm": "hp_expert.gradients",
        "load_experts": "hp_expert.checkpoint.load",
        "load_imbalance": "hp_expert.routing.correction",
        "record_routing": "hp_expert.hugging_face.replay",
        "reduce_expert_gradients": "hp_expert.gradients",
        "register_correction_bias_update": "hp_expert.routing.correction",
        "register_with_transformers": "hp_expert.hugging_face.apply",
        "replay_routing": "hp_expert.hugging_face.replay",
        "routed_swiglu": "hp_expert.experts.swiglu",
        "routed_swiglu_fused": "hp_expert.experts.swiglu",
        "router_z_loss": "hp_expert.routing.balance",
        "rows_per_pair": "hp_expert.dispatch.bounded",
        "save_experts": "hp_expert.checkpoint.save",
        "save_routing": "hp_expert.routing.recompute",
        "sequence_balance_loss": "hp_expert.routing.balance",
        "shard_groups": "hp_expert.gradients",
        "sort_by_expert": "hp_expert.permute",
        "stacked_parts": "hp_expert.checkpoint.parts",
        "sum_slots": "hp_expert.permute",
        "take_loads": "hp_expert.routing.correction",
        "to_hf": "hp_expert.checkpoint.parts",
        "update_correction_biases": "hp_expert.routing.correction",
    },
)
