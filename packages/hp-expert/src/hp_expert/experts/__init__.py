"""Experts with stacked weights, and the arithmetic of them."""

from hp_expert.experts.module import GroupedExperts
from hp_expert.experts.swiglu import autocast, routed_swiglu

__all__ = ["GroupedExperts", "autocast", "routed_swiglu"]
