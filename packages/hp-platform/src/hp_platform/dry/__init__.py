"""A device that computes nothing: the real code of a rank on CUDA and NCCL, without a GPU."""

from hp_platform.dry.current import active as active_device
from hp_platform.dry.current import is_dry
from hp_platform.dry.device import DryDevice
from hp_platform.dry.gpu import Gpu
from hp_platform.dry.matching import Problem
from hp_platform.dry.order import prove, same_program
from hp_platform.dry.run import DryRun, DryRunError, run_ranks

__all__ = [
    "DryDevice",
    "DryRun",
    "DryRunError",
    "Gpu",
    "Problem",
    "active_device",
    "is_dry",
    "prove",
    "run_ranks",
    "same_program",
]
