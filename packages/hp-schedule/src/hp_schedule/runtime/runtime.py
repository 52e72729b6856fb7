"""Run a schedule: the public face of the torch runtime."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from hp_schedule.executor import Executor, Handler
from hp_schedule.ir import MetaStep, MetaStepType
from hp_schedule.runtime.driver import Batch, LossFunction, PipelineContext, StageDriver
from hp_schedule.runtime.recorder import Recorder
from hp_schedule.runtime.stage import PipelineStage
from hp_schedule.schedule import Schedule
from hp_schedule.timeline import Timeline
from hp_schedule.transport import Transport
from hp_schedule.validation import validate

CustomFunction = Callable[[MetaStep, PipelineContext], None]


class PipelineResult:
    """What a run returned.

    Attributes:
        losses: One detached scalar per microbatch on the rank of the last stage; empty elsewhere
            and without a loss function.
        outputs: One output per microbatch on the rank of the last stage after a forward-only
            schedule; empty otherwise.
    """

    def __init__(
        self,
        losses: Sequence[Tensor],
        outputs: Sequence[Tensor],
        timeline: Callable[[], Timeline],
    ) -> None:
        self.losses = list(losses)
        self.outputs = list(outputs)
        self._timeline = timeline

    @property
    def timeline(self) -> Timeline:
        """This rank's spans, in seconds since the epoch; empty if nothing was recorded.

        On CUDA the first look waits until the device has got to the end of the run.
        """
        return self._timeline()


class PipelineScheduleRuntime:
    """Runs one rank's row of a schedule on its stages, again and again.

    Every rank of the pipeline makes one and calls `run_microbatches` the same number of times.

    Args:
        stages: This rank's stages, all those that the schedule places on it.
        schedule: With communication steps, unless all stages are on one rank. Checked here.
        pipeline_rank: This rank's row.
        transport: Moves messages; may be None if all stages are on one rank.
        loss_fn: ``loss_fn(output, target)`` returns a scalar on the last stage; its backward is
            the start of all others, without any scaling. Needed by schedules with backwards.
        on_step: Called before each step, for example to tell a watchdog.

    Raises:
        ScheduleError: If the schedule is not valid.
        ValueError: If stages, schedule, transport and loss function do not fit each other.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        schedule: Schedule,
        *,
        pipeline_rank: int,
        transport: Transport[Tensor] | None = None,
        loss_fn: LossFunction | None = None,
        on_step: Callable[[MetaStep], None] | None = None,
    ) -> None:
        self._stages = {stage.stage_index: stage for stage in stages}
        self._schedule = schedule
        self._rank = pipeline_rank
        self._transport = transport
        self._loss_fn = loss_fn
        self._on_step = on_step
        self._custom: dict[MetaStepType, CustomFunction] = {}
        self._check()

    def register_custom_function(self, step_type: MetaStepType, fn: CustomFunction) -> None:
        """Run `fn(step, context)` instead of the built-in code for every step of a type.

        For example OVERLAP_B_F, to run its halves at the same time, or the FSDP steps, for which
        there is no built-in code. Registering again replaces the function.
        """
        self._custom[step_type] = fn

    def run_microbatches(
        self,
        args: Sequence[Sequence[Any]],
        kwargs: Sequence[Mapping[str, Any]] | None = None,
        targets: Sequence[Any] | None = None,
        *,
        record: bool = True,
    ) -> PipelineResult:
        """Run the schedule once over its microbatches; parameter gradients accumulate.

        Args:
            args: For each microbatch the positional arguments of the first stage; read only where
                that stage is.
            kwargs: For each microbatch the keyword arguments of every stage's module.
            targets: For each microbatch the second argument of the loss function; read only where
                the last stage is.
            record: Whether to record the timeline.

        Raises:
            ValueError: If there is not one entry per microbatch.
            Exception: Whatever a stage raised, with a note that names rank, stage, microbatch and
                step. This rank's connections are closed then, so that the other ranks fail too
                instead of waiting; the runtime cannot be used again.
        """
        batch = self._batch(args, kwargs, targets)
        device = next(iter(self._stages.values())).device
        recorder = Recorder(self._rank, device) if record else None
        driver = StageDriver(
            rank=self._rank,
            schedule=self._schedule,
            stages=self._stages,
            transport=self._transport,
            loss_fn=self._loss_fn,
            batch=batch,
            recorder=recorder,
        )
        executor = Executor(
            self._schedule.steps[self._rank],
            driver,
            handlers=self._handlers(driver, batch),
            on_step=self._on_step,
        )
        try:
            executor.advance()
            driver.finish()
        except BaseException as error:
            error.add_note(self._where(executor))
            if self._transport is not None:
                self._transport.abort()
            raise
        return PipelineResult(
            [loss for _, loss in sorted(driver.losses.items())],
            [output for _, output in sorted(driver.outputs.items())],
            Timeline if recorder is None else recorder.timeline,
        )

    def _handlers(self, driver: StageDriver, batch: Batch) -> dict[MetaStepType, Handler]:
        context = PipelineContext(
            rank=self._rank,
            schedule=self._schedule,
            stages=self._stages,
            batch=batch,
            run=driver.run,
        )
        return {kind: _bind(fn, context) for kind, fn in self._custom.items()}

    def _batch(
        self,
        args: Sequence[Sequence[Any]],
        kwargs: Sequence[Mapping[str, Any]] | None,
        targets: Sequence[Any] | None,
    ) -> Batch:
        num = self._schedule.num_microbatches
        batch = Batch(
            args=args,
            kwargs=[{}] * num if kwargs is None else kwargs,
            targets=() if targets is None else targets,
        )
        for name, given in (("args", args), ("kwargs", batch.kwargs), ("targets", targets)):
            if given is not None and len(given) != num:
                raise ValueError(f"len({name}) ({len(given)}) must equal num_microbatches ({num})")
        has_last = any(stage.is_last for stage in self._stages.values())
        if targets is None and has_last and not self._schedule.is_forward_only:
            raise ValueError("targets (None) must be given to train the last stage")
        return batch

    def _where(self, executor: Executor) -> str:
        step = executor.step
        if step is None:
            return f"rank {self._rank}: while its last messages were on their way"
        parts = [f"rank {self._rank}"]
        for leaf in step.leaves():
            parts.append(f"stage {leaf.stage_index}")
            if leaf.microbatch_index is not None:
                parts.append(f"microbatch {leaf.microbatch_index}")
        return f"{', '.join(parts)}: in step {step} (cell {executor.position} of the schedule)"

    def _check(self) -> None:
        schedule = self._schedule
        if not 0 <= self._rank < schedule.num_ranks:
            raise ValueError(
                f"pipeline_rank ({self._rank}) must be >= 0 and < num_ranks ({schedule.num_ranks})"
            )
        if len(schedule.chains) != 1 or schedule.chains[0] != tuple(range(schedule.num_stages)):
            raise ValueError(f"chains ({len(schedule.chains)}) must be one, of stages in order")
        placed = list(schedule.stages_of(self._rank))
        if sorted(self._stages) != placed:
            raise ValueError(
                f"stages ({sorted(self._stages)}) must be those that the schedule places on rank "
                f"{self._rank} ({placed})"
            )
        for stage in self._stages.values():
            if stage.num_stages != schedule.num_stages:
                raise ValueError(
                    f"num_stages ({stage.num_stages}) of stage {stage.stage_index} must equal the "
                    f"schedule's ({schedule.num_stages})"
                )
        if schedule.edges and self._transport is None:
            raise ValueError("transport (None) must be given for a schedule with messages")
        if self._loss_fn is None and not schedule.is_forward_only:
            raise ValueError("loss_fn (None) must be given for a schedule with backwards")
        validate(schedule, communication=bool(schedule.edges)).raise_if_failed()


def _bind(fn: CustomFunction, context: PipelineContext) -> Handler:
    def run(step: MetaStep) -> None:
        fn(step, context)

    return run
