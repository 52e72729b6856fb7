"""Run schedules on torch modules; needs the extra ``hp-schedule[runtime]``."""

from hp_schedule.runtime.driver import Batch, PipelineContext
from hp_schedule.runtime.runtime import PipelineResult, PipelineScheduleRuntime
from hp_schedule.runtime.stage import PipelineStage, TensorSpec
from hp_schedule.runtime.transport import EdgeGroups, TorchTransport, build_edge_groups

__all__ = [
    "Batch",
    "EdgeGroups",
    "PipelineContext",
    "PipelineResult",
    "PipelineScheduleRuntime",
    "PipelineStage",
    "TensorSpec",
    "TorchTransport",
    "build_edge_groups",
]
