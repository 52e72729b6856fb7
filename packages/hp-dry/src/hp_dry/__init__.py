"""A device that computes nothing: the real code of a rank on CUDA and NCCL, without a GPU."""

from hp_dry.classes import Classes
from hp_dry.cuda.current import active as active_device
from hp_dry.device.device import DryDevice
from hp_dry.gpu import Gpu
from hp_dry.memory.allocator import OutOfMemory, Segment, Usage, least_bytes, replay
from hp_dry.proof.hazards import Hazard
from hp_dry.proof.loads import late_loads
from hp_dry.proof.matching import Problem
from hp_dry.proof.order import prove, same_program
from hp_dry.proof.streams import check_streams
from hp_dry.run import DryRun, DryRunError, run_ranks

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
    "__version__",
    "active_device",
    "check_streams",
    "late_loads",
    "least_bytes",
    "prove",
    "replay",
    "run_ranks",
    "same_program",
]
__version__ = "0.1.0"
