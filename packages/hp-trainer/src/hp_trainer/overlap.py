"""Steps that are a forward and a backward at once: hp-schedule's pairs, run by hp-overlap.

A pair's halves have received what they read before they start, and send what they made after both
have ended, so between the two nothing is exchanged but tokens between experts. Those exchanges are
launched in an order that only the two halves decide. Ranks that share experts run the same row of
the schedule, hence the same pairs, and so launch the same exchanges in the same order.
"""

from dataclasses import replace

from torch import nn
from torch.distributed import ProcessGroup

import hp_overlap
from hp_expert import AllToAllDispatcher, SpreadExperts
from hp_schedule import MetaStep, MetaStepType
from hp_schedule.runtime import PipelineContext, PipelineScheduleRuntime

__all__ = ["overlap_experts", "overlap_pairs"]


def overlap_experts(
    module: nn.Module,
    overlap: "hp_overlap.CommComputeOverlap",
    *,
    small_group: ProcessGroup | None = None,
) -> None:
    """Let the exchanges of all experts in a module be overlapped.

    Args:
        module: Module whose experts have been spread over ranks; changed in place.
        overlap: Runs the pairs later.
        small_group: Same as of `hp_expert.AllToAllDispatcher`: what one side of a pair sends beside
            its rows then does not wait for rows of the other; None: it does.
    """
    for part in module.modules():
        if isinstance(part, SpreadExperts):
            dispatcher = part.dispatcher
            if small_group is not None and isinstance(dispatcher, AllToAllDispatcher):
                dispatcher = replace(dispatcher, small_group=small_group)
            part.dispatcher = overlap.wrap_dispatcher(dispatcher)


def overlap_pairs(
    runtime: PipelineScheduleRuntime, overlap: "hp_overlap.CommComputeOverlap"
) -> None:
    """Have the runtime run the halves of OVERLAP_B_F and OVERLAP_F_B steps at the same time.

    Args:
        runtime: Waits for the inputs of both halves before it has them run.
        overlap: Overlap whose hooks are in the modules of the runtime's stages.
    """

    def run(step: MetaStep, context: PipelineContext) -> None:
        first, second = step.sub_steps
        forward, backward = (first, second) if first.type is MetaStepType.FWD else (second, first)
        overlap.run(lambda: context.run(forward), lambda: context.run(backward))

    for kind in (MetaStepType.OVERLAP_B_F, MetaStepType.OVERLAP_F_B):
        runtime.register_custom_function(kind, run)
