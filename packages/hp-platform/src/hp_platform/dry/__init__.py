"""A device that computes nothing: the real code of a rank on CUDA and NCCL, without a GPU."""

from hp_platform.dry.allocator import OutOfMemory, Segment, Usage, replay
from hp_platform.dry.current import active as active_device
from hp_platform.dry.current import is_dry
from hp_platform.dry.device import DryDevice
from hp_platform.dry.gpu import Gpu
from hp_platform.dry.hazards import Hazard
from hp_platform.dry.matching import Problem
from hp_platform.dry.order import prove, same_program
from hp_platform.dry.run import DryRun, DryRunError, run_ranks
from hp_platform.dry.streams import check_streams

__all__ = [
    "DryDevice",
    "DryRun",
    "DryRunError",
    "Gpu",
    "Hazard",
    "OutOfMemory",
    "Problem",
    "Segment",
    "Usage",
    "active_device",
    "check_streams",
    "is_dry",
    "prove",
    "replay",
    "run_ranks",
    "same_program",
]
