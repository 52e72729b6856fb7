"""Experts with stacked weights, and the arithmetic of them."""

from hp_expert.experts.activation import Activation, ClampedSwiGLU, SwiGLU
from hp_expert.experts.grouped import GroupedProducts
from hp_expert.experts.module import GroupedExperts
from hp_expert.experts.swiglu import routed_swiglu, routed_swiglu_fused

__all__ = [
    "Activation",
    "ClampedSwiGLU",
    "GroupedExperts",
    "GroupedProducts",
    "SwiGLU",
    "routed_swiglu",
    "routed_swiglu_fused",
]
