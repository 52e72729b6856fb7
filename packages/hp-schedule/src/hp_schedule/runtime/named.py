"""The schedules by name, for code that constructs one and calls `run`."""

from collections.abc import Sequence
from typing import Literal, Unpack

from hp_schedule.generators import (
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    v_half,
    v_min,
    zbv,
    zero_bubble,
)
from hp_schedule.runtime.schedules import PipelineSchedule, ScheduleOptions
from hp_schedule.runtime.stage import PipelineStage
from hp_schedule.schedule import Schedule

Stages = PipelineStage | Sequence[PipelineStage]


class ScheduleGPipe(PipelineSchedule):
    """All forwards, then all backwards; one stage per rank."""

    def construct_exec_order(self) -> Schedule:
        """Return `hp_schedule.gpipe`."""
        return gpipe(self.num_ranks, num_microbatches=self.num_microbatches)


class Schedule1F1B(PipelineSchedule):
    """One forward, one backward; one stage per rank."""

    def construct_exec_order(self) -> Schedule:
        """Return `hp_schedule.one_f_one_b`."""
        return one_f_one_b(self.num_ranks, num_microbatches=self.num_microbatches)


class ScheduleLoopedBFS(PipelineSchedule):
    """GPipe over several stages per rank, stage by stage."""

    def construct_exec_order(self) -> Schedule:
        """Return `hp_schedule.looped_bfs`."""
        return looped_bfs(
            self.num_ranks,
            num_microbatches=self.num_microbatches,
            num_stages_per_rank=self.num_stages_per_rank,
        )


class ScheduleInterleaved1F1B(PipelineSchedule):
    """1F1B over several stages per rank; any number of microbatches.

    Args:
        stages: This rank's.
        num_microbatches: Of each run.
        overlap_b_f: Whether a backward and the forward after it are one step, which a function
            registered for OVERLAP_B_F may run at the same time.
        **options: See `PipelineSchedule`.
    """

    def __init__(
        self,
        stages: Stages,
        num_microbatches: int,
        *,
        overlap_b_f: bool = False,
        **options: Unpack[ScheduleOptions],
    ) -> None:
        self._overlap_b_f = overlap_b_f
        super().__init__(stages, num_microbatches, **options)

    def construct_exec_order(self) -> Schedule:
        """Return `hp_schedule.interleaved_1f1b`."""
        return interleaved_1f1b(
            self.num_ranks,
            num_microbatches=self.num_microbatches,
            num_stages_per_rank=self.num_stages_per_rank,
            overlap_b_f=self._overlap_b_f,
        )


class ScheduleZeroBubble(PipelineSchedule):
    """1F1B with weight gradients put off into the gaps; one stage per rank.

    Args:
        stages: This rank's.
        num_microbatches: Of each run.
        max_in_flight: Microbatches whose activations a rank may hold: a number, or in terms of the
            number of ranks.
        **options: See `PipelineSchedule`.
    """

    def __init__(
        self,
        stages: Stages,
        num_microbatches: int,
        *,
        max_in_flight: Literal["1p", "1.5p", "2p"] | int = "1p",
        **options: Unpack[ScheduleOptions],
    ) -> None:
        self._max_in_flight = max_in_flight
        super().__init__(stages, num_microbatches, **options)

    def construct_exec_order(self) -> Schedule:
        """Return `hp_schedule.zero_bubble`."""
        return zero_bubble(
            self.num_ranks,
            num_microbatches=self.num_microbatches,
            max_in_flight=self._max_in_flight,
        )


class ScheduleInterleavedZeroBubble(PipelineSchedule):
    """Interleaved 1F1B with weight gradients put off into the gaps."""

    def construct_exec_order(self) -> Schedule:
        """Return `hp_schedule.interleaved_zero_bubble`."""
        return interleaved_zero_bubble(
            self.num_ranks,
            num_microbatches=self.num_microbatches,
            num_stages_per_rank=self.num_stages_per_rank,
        )


class ScheduleZBV(PipelineSchedule):
    """Zero bubble over two stages per rank, there and back: rank 0 has the first and the last."""

    def construct_exec_order(self) -> Schedule:
        """Return `hp_schedule.zbv`."""
        return zbv(self.num_ranks, num_microbatches=self.num_microbatches)


class ScheduleVHalf(PipelineSchedule):
    """There and back with half of the activation memory of 1F1B."""

    def construct_exec_order(self) -> Schedule:
        """Return `hp_schedule.v_half`."""
        return v_half(self.num_ranks, num_microbatches=self.num_microbatches)


class ScheduleVMin(PipelineSchedule):
    """There and back with a third of the activation memory of 1F1B."""

    def construct_exec_order(self) -> Schedule:
        """Return `hp_schedule.v_min`."""
        return v_min(self.num_ranks, num_microbatches=self.num_microbatches)


class ScheduleDualPipeV(PipelineSchedule):
    """There and back, with a forward and a backward as one step wherever both are at hand.

    A function registered for OVERLAP_F_B or OVERLAP_B_F may run the two at the same time.
    """

    def construct_exec_order(self) -> Schedule:
        """Return `hp_schedule.dualpipe_v`."""
        return dualpipe_v(self.num_ranks, num_microbatches=self.num_microbatches)
