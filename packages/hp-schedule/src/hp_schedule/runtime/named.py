"""The schedules by name, for code that constructs one and calls `run`.

Schedules without a class here run too: `from_schedule` takes the schedule of any generator, and a
class is a name.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Literal, Unpack

from hp_schedule.generators import SCHEDULES
from hp_schedule.runtime.schedules import PipelineSchedule, ScheduleOptions
from hp_schedule.runtime.stage import PipelineStage
from hp_schedule.schedule import Schedule

Stages = PipelineStage | Sequence[PipelineStage]


class NamedSchedule(PipelineSchedule):
    """A schedule of the registry. Subclass it and give the name.

    Attributes:
        name: Name of the schedule in `hp_schedule.SCHEDULES`.
        chosen: Options of its generator.
    """

    name: ClassVar[str]
    chosen: Mapping[str, object] = MappingProxyType({})

    def construct_exec_order(self) -> Schedule:
        """Return the schedule of the generator of that name."""
        kind = SCHEDULES[self.name]
        return kind.build(
            self.num_ranks,
            self.num_microbatches,
            kind.stages_per_rank or self.num_stages_per_rank,
            paired=None,
            **self.chosen,
        )


class ScheduleGPipe(NamedSchedule):
    """All forwards, then all backwards; one stage per rank."""

    name = "gpipe"


class Schedule1F1B(NamedSchedule):
    """One forward, one backward; one stage per rank."""

    name = "1f1b"


class ScheduleLoopedBFS(NamedSchedule):
    """GPipe over several stages per rank, stage by stage."""

    name = "looped_bfs"


class ScheduleInterleaved1F1B(NamedSchedule):
    """1F1B over several stages per rank; any number of microbatches.

    Args:
        stages: This rank's.
        num_microbatches: Number of microbatches of each run.
        overlap_b_f: Whether a backward and the forward after it are one step, which a function
            registered for OVERLAP_B_F may run at the same time.
        **options: See `PipelineSchedule`.
    """

    name = "interleaved_1f1b"

    def __init__(
        self,
        stages: Stages,
        num_microbatches: int,
        *,
        overlap_b_f: bool = False,
        **options: Unpack[ScheduleOptions],
    ) -> None:
        self.chosen = {"overlap_b_f": overlap_b_f}
        super().__init__(stages, num_microbatches, **options)


class ScheduleZeroBubble(NamedSchedule):
    """1F1B with weight gradients put off into the gaps; one stage per rank.

    Args:
        stages: This rank's.
        num_microbatches: Number of microbatches of each run.
        max_in_flight: Microbatches whose activations a rank may hold: a number, or in terms of the
            number of ranks.
        **options: See `PipelineSchedule`.
    """

    name = "zero_bubble"

    def __init__(
        self,
        stages: Stages,
        num_microbatches: int,
        *,
        max_in_flight: Literal["1p", "1.5p", "2p"] | int = "1p",
        **options: Unpack[ScheduleOptions],
    ) -> None:
        self.chosen = {"max_in_flight": max_in_flight}
        super().__init__(stages, num_microbatches, **options)


class ScheduleInterleavedZeroBubble(NamedSchedule):
    """Interleaved 1F1B with weight gradients put off into the gaps."""

    name = "interleaved_zero_bubble"


class ScheduleZBV(NamedSchedule):
    """Zero bubble over two stages per rank, there and back: rank 0 has the first and the last."""

    name = "zbv"


class ScheduleVHalf(NamedSchedule):
    """There and back with half of the activation memory of 1F1B."""

    name = "v_half"


class ScheduleVMin(NamedSchedule):
    """There and back with a third of the activation memory of 1F1B."""

    name = "v_min"


class ScheduleDualPipeV(NamedSchedule):
    """There and back, with a forward and a backward as one step wherever both are at hand.

    A function registered for OVERLAP_F_B or OVERLAP_B_F may run the two at the same time.
    """

    name = "dualpipe_v"
