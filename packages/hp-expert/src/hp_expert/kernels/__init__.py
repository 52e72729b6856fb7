"""What is computed beside products: rows moved, slots sorted, tokens routed, on CUDA by Triton."""

from hp_expert.kernels.choice import RowKernels, fuses, kernels_for

__all__ = ["RowKernels", "fuses", "kernels_for"]
