"""Pipeline stages with different tensor-parallel sizes, straight or U-shaped.

Everything here needs no torch; `hp_vtp.transport` executes plans over torch.distributed.
"""

from hp_vtp.plan.cost import Links, bound_seconds, predicted_seconds
from hp_vtp.plan.explain import explain
from hp_vtp.plan.planner import plan_edge, plan_transfer
from hp_vtp.plan.transfer import Algorithm, Move, Step, StepKind, TransferPlan
from hp_vtp.topology.layout import Edge, LayoutError, PipelineLayout, StageLayout
from hp_vtp.topology.placement import Placement, Replicated, Sharded

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
