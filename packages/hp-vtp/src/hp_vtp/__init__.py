"""Pipeline stages with different tensor-parallel sizes, straight or U-shaped.

Everything here needs no torch; `hp_vtp.transport` executes plans over torch.distributed.
A name loads its module when it is first used.
"""

from typing import TYPE_CHECKING

from hp_base.lazy import lazily

if TYPE_CHECKING:
    from hp_vtp.plan import (
        Algorithm,
        Links,
        Move,
        Step,
        StepKind,
        TransferPlan,
        bound_seconds,
        predicted_seconds,
    )
    from hp_vtp.plan.explain import explain
    from hp_vtp.plan.planner import plan_edge, plan_transfer
    from hp_vtp.topology import Edge, LayoutError, PipelineLayout, StageLayout
    from hp_vtp.topology.stages import Placement, Replicated, Sharded

__all__ = [
    "Algorithm",
    "Edge",
    "LayoutError",
    "Links",
    "Move",
    "PipelineLayout",
    "Placement",
    "Replicated",
    "Sharded",
    "StageLayout",
    "Step",
    "StepKind",
    "TransferPlan",
    "__version__",
    "bound_seconds",
    "explain",
    "plan_edge",
    "plan_transfer",
    "predicted_seconds",
]
__version__ = "0.1.0"

__getattr__, __dir__ = lazily(
    __name__,
    {
        "Algorithm": "hp_vtp.plan",
        "Edge": "hp_vtp.topology",
        "LayoutError": "hp_vtp.topology",
        "Links": "hp_vtp.plan",
        "Move": "hp_vtp.plan",
        "PipelineLayout": "hp_vtp.topology",
        "Placement": "hp_vtp.topology.stages",
        "Replicated": "hp_vtp.topology.stages",
        "Sharded": "hp_vtp.topology.stages",
        "StageLayout": "hp_vtp.topology",
        "Step": "hp_vtp.plan",
        "StepKind": "hp_vtp.plan",
        "TransferPlan": "hp_vtp.plan",
        "bound_seconds": "hp_vtp.plan",
        "explain": "hp_vtp.plan.explain",
        "plan_edge": "hp_vtp.plan.planner",
        "plan_transfer": "hp_vtp.plan.planner",
        "predicted_seconds": "hp_vtp.plan",
    },
)
