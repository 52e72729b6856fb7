"""Run schedules on torch modules; needs the extra ``hp-schedule[runtime]``."""

from hp_schedule.runtime.backward import BackwardSplitter, DeferringSplitter
from hp_schedule.runtime.context import Batch, PipelineContext
from hp_schedule.runtime.defer import defer_weight_gradients
from hp_schedule.runtime.fsdp import FullySharded
from hp_schedule.runtime.graph_cut import GraphCuttingSplitter
from hp_schedule.runtime.named import (
    NamedSchedule,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleVHalf,
    ScheduleVMin,
    ScheduleZBV,
    ScheduleZeroBubble,
)
from hp_schedule.runtime.result import PipelineResult
from hp_schedule.runtime.runtime import PipelineScheduleRuntime, RuntimeOptions
from hp_schedule.runtime.schedules import PipelineSchedule, ScheduleOptions, from_schedule
from hp_schedule.runtime.sharding import StageSharding
from hp_schedule.runtime.shared import SharedParameterInfo, SharedParameters, share_parameters
from hp_schedule.runtime.specs import HeaderRead, TensorSpec
from hp_schedule.runtime.split_model import SplitModel, split_model
from hp_schedule.runtime.stage import PipelineStage
from hp_schedule.runtime.torch_schedule import TorchSchedule, TorchStage, as_torch_schedule
from hp_schedule.runtime.transport import EdgeGroups, TorchTransport, build_edge_groups

__all__ = [
    "BackwardSplitter",
    "Batch",
    "DeferringSplitter",
    "EdgeGroups",
    "FullySharded",
    "GraphCuttingSplitter",
    "HeaderRead",
    "NamedSchedule",
    "PipelineContext",
    "PipelineResult",
    "PipelineSchedule",
    "PipelineScheduleRuntime",
    "PipelineStage",
    "RuntimeOptions",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleOptions",
    "ScheduleVHalf",
    "ScheduleVMin",
    "ScheduleZBV",
    "ScheduleZeroBubble",
    "SharedParameterInfo",
    "SharedParameters",
    "SplitModel",
    "StageSharding",
    "TensorSpec",
    "TorchSchedule",
    "TorchStage",
    "TorchTransport",
    "as_torch_schedule",
    "build_edge_groups",
    "defer_weight_gradients",
    "from_schedule",
    "share_parameters",
    "split_model",
]
