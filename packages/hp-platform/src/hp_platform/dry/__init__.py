"""A device that computes nothing: the real code of a rank on CUDA and NCCL, without a GPU."""

from hp_platform.dry.classes import Classes
from hp_platform.dry.cuda.current import active as active_device
from hp_platform.dry.cuda.current import is_dry
from hp_platform.dry.device.device import DryDevice
from hp_platform.dry.gpu import Gpu
from hp_platform.dry.memory.allocator import OutOfMemory, Segment, Usage, least_bytes, replay
from hp_platform.dry.proof.hazards import Hazard
from hp_platform.dry.proof.loads import late_loads
from hp_platform.dry.proof.matching import Problem
from hp_platform.dry.proof.order import prove, same_program
from hp_platform.dry.proof.streams import check_streams
from hp_platform.dry.run import DryRun, DryRunError, run_ranks

__all__ = [
    "Classes",
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
    "late_loads",
    "least_bytes",
    "prove",
    "replay",
    "run_ranks",
    "same_program",
]
