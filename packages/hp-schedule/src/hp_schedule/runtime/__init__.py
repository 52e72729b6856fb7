"""Run schedules on torch modules; needs the extra ``hp-schedule[runtime]``."""

from typing import TYPE_CHECKING

from hp_base.lazy import lazily

if TYPE_CHECKING:
    from hp_schedule.runtime.batch import Batch, PipelineContext, PipelineResult
    from hp_schedule.runtime.fsdp import FullySharded, StageSharding
    from hp_schedule.runtime.graph_cut import GraphCuttingSplitter
    from hp_schedule.runtime.hugging_face import SplitModel, split_model
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
    from hp_schedule.runtime.runtime import PipelineScheduleRuntime, RuntimeOptions
    from hp_schedule.runtime.schedules import PipelineSchedule, ScheduleOptions, from_schedule
    from hp_schedule.runtime.shared import SharedParameterInfo, SharedParameters, share_parameters
    from hp_schedule.runtime.specs import HeaderRead, TensorSpec
    from hp_schedule.runtime.stage import (
        BackwardSplitter,
        DeferringSplitter,
        PipelineStage,
        defer_weight_gradients,
    )
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

__getattr__, __dir__ = lazily(
    __name__,
    {
        "BackwardSplitter": "hp_schedule.runtime.stage",
        "Batch": "hp_schedule.runtime.batch",
        "DeferringSplitter": "hp_schedule.runtime.stage",
        "EdgeGroups": "hp_schedule.runtime.transport",
        "FullySharded": "hp_schedule.runtime.fsdp",
        "GraphCuttingSplitter": "hp_schedule.runtime.graph_cut",
        "HeaderRead": "hp_schedule.runtime.specs",
        "NamedSchedule": "hp_schedule.runtime.named",
        "PipelineContext": "hp_schedule.runtime.batch",
        "PipelineResult": "hp_schedule.runtime.batch",
        "PipelineSchedule": "hp_schedule.runtime.schedules",
        "PipelineScheduleRuntime": "hp_schedule.runtime.runtime",
        "PipelineStage": "hp_schedule.runtime.stage",
        "RuntimeOptions": "hp_schedule.runtime.runtime",
        "Schedule1F1B": "hp_schedule.runtime.named",
        "ScheduleDualPipeV": "hp_schedule.runtime.named",
        "ScheduleGPipe": "hp_schedule.runtime.named",
        "ScheduleInterleaved1F1B": "hp_schedule.runtime.named",
        "ScheduleInterleavedZeroBubble": "hp_schedule.runtime.named",
        "ScheduleLoopedBFS": "hp_schedule.runtime.named",
        "ScheduleOptions": "hp_schedule.runtime.schedules",
        "ScheduleVHalf": "hp_schedule.runtime.named",
        "ScheduleVMin": "hp_schedule.runtime.named",
        "ScheduleZBV": "hp_schedule.runtime.named",
        "ScheduleZeroBubble": "hp_schedule.runtime.named",
        "SharedParameterInfo": "hp_schedule.runtime.shared",
        "SharedParameters": "hp_schedule.runtime.shared",
        "SplitModel": "hp_schedule.runtime.hugging_face",
        "StageSharding": "hp_schedule.runtime.fsdp",
        "TensorSpec": "hp_schedule.runtime.specs",
        "TorchSchedule": "hp_schedule.runtime.torch_schedule",
        "TorchStage": "hp_schedule.runtime.torch_schedule",
        "TorchTransport": "hp_schedule.runtime.transport",
        "as_torch_schedule": "hp_schedule.runtime.torch_schedule",
        "build_edge_groups": "hp_schedule.runtime.transport",
        "defer_weight_gradients": "hp_schedule.runtime.stage",
        "from_schedule": "hp_schedule.runtime.schedules",
        "share_parameters": "hp_schedule.runtime.shared",
        "split_model": "hp_schedule.runtime.hugging_face",
    },
)
