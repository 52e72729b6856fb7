"""How rows are moved between token order and expert order: by torch, or on CUDA by Triton."""

from hp_expert.kernels.choice import RowKernels, kernels_for

__all__ = ["RowKernels", "kernels_for"]
