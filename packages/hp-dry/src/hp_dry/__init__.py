"""The real code of a torch program on GPUs that are not there: memory, launches, deadlocks.

A public name loads its module at its first use, so that readers of traces need no torch.
"""

from typing import TYPE_CHECKING

from hp_base.lazy import lazily

if TYPE_CHECKING:
    from hp_dry.cluster import Classes, Gpu
    from hp_dry.device import DryDevice
    from hp_dry.memory.allocator import OutOfMemory, Segment, Usage, least_bytes, replay
    from hp_dry.proof.loads import late_loads
    from hp_dry.proof.matching import Problem
    from hp_dry.proof.order import prove, same_program
    from hp_dry.proof.streams import Hazard, check_streams
    from hp_dry.recording.recorder import DeviceRecorder
    from hp_dry.recording.recorder import active as active_device
    from hp_dry.run import DryRun, DryRunError, run_ranks
    from hp_dry.script import rehearse_script

__all__ = [
    "Classes",
    "DeviceRecorder",
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
    "rehearse_script",
    "replay",
    "run_ranks",
    "same_program",
]
__version__ = "0.1.0"

__getattr__, __dir__ = lazily(
    __name__,
    {
        "Classes": "hp_dry.cluster",
        "DeviceRecorder": "hp_dry.recording.recorder",
        "DryDevice": "hp_dry.device",
        "DryRun": "hp_dry.run",
        "DryRunError": "hp_dry.run",
        "Gpu": "hp_dry.cluster",
        "Hazard": "hp_dry.proof.streams",
        "OutOfMemory": "hp_dry.memory.allocator",
        "Problem": "hp_dry.proof.matching",
        "Segment": "hp_dry.memory.allocator",
        "Usage": "hp_dry.memory.allocator",
        "active_device": "hp_dry.recording.recorder:active",
        "check_streams": "hp_dry.proof.streams",
        "late_loads": "hp_dry.proof.loads",
        "least_bytes": "hp_dry.memory.allocator",
        "prove": "hp_dry.proof.order",
        "rehearse_script": "hp_dry.script",
        "replay": "hp_dry.memory.allocator",
        "run_ranks": "hp_dry.run",
        "same_program": "hp_dry.proof.order",
    },
)
