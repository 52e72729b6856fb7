"""A device that computes nothing: the real code of a rank on CUDA and NCCL, without a GPU."""

from hp_platform.dry.device import DryDevice, is_dry
from hp_platform.dry.gpu import Gpu

__all__ = ["DryDevice", "Gpu", "is_dry"]
