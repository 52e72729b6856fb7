"""Runtimes that run a schedule, or its forward part, on torch modules."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import TypedDict

from torch import Tensor

from hp_platform import mark_place
from hp_schedule.executor import Executor, Handler
from hp_schedule.runtime.batch import (
    Batch,
    BatchDims,
    LossFunction,
    PipelineContext,
    PipelineResult,
    Recorder,
    split_args,
    split_kwargs,
)
from hp_schedule.runtime.driver import StageDriver
from hp_schedule.runtime.fsdp import StageSharding, check_sharding
from hp_schedule.runtime.p2p import Expectations
from hp_schedule.runtime.shared import SharedParameters
from hp_schedule.runtime.stage import PipelineStage
from hp_schedule.schedule import Schedule
from hp_schedule.steps import (
    FSDP_RESHARD,
    FSDP_UNSHARD,
    FWD,
    FWD_RECV,
    FWD_SEND,
    KIND_MASK,
    STAGE_MASK,
    STAGE_SHIFT,
    MetaStep,
    MetaStepType,
    leaves,
)
from hp_schedule.timeline import Timeline
from hp_schedule.transport import Transport
from hp_schedule.validation.validate import validate

CustomFunction = Callable[[MetaStep, PipelineContext], None]


_KEPT = {FWD, FWD_SEND, FWD_RECV}


class RuntimeOptions(TypedDict, total=False):
    """Keyword arguments of `PipelineScheduleRuntime` that do not depend on the schedule."""

    loss_fn: LossFunction | None
    loss_scale: float
    sharding: StageSharding | None
    args_batch_dim: BatchDims | None
    kwargs_batch_dim: Mapping[str, int | None] | None
    target_batch_dim: int | None
    output_concat_dim: int
    return_outputs: bool | None
    on_step: Callable[[MetaStep], None] | None


class PipelineScheduleRuntime:
    """Runs one rank's row of a schedule on its stages, again and again.

    Every rank of the pipeline makes one and calls `run`, `run_microbatches` and `evaluate` in the
    same order.

    Args:
        stages: This rank's stages, all those that the schedule places on it.
        schedule: Schedule with communication steps, unless all stages are on one rank. Checked
            here.
        pipeline_rank: This rank's row.
        transport: Moves messages; may be None if all stages are on one rank.
        loss_fn: ``loss_fn(output, target)`` returns a scalar on the last stage of a chain. None:
            the output of that stage is the loss.
        loss_scale: Factor of each loss in the backward, for example 1 / number of microbatches;
            reported losses are not scaled. May be set anew between runs. Existing gradients are
            left as they are, so several runs accumulate.
        sharding: Does the FSDP steps of the schedule.
        shared_parameters: Parameters that several stages have; their gradients are added up at the
            end of every run.
        args_batch_dim: For each positional argument of `run` the dim to cut along, None to hand it
            to every microbatch whole; default 0 for all.
        kwargs_batch_dim: The same by name; default 0 for those not named.
        target_batch_dim: The same for the targets.
        output_concat_dim: The dim along which `PipelineResult.output` puts outputs together.
        return_outputs: Whether to return the outputs of the last stages; None: only without
            backwards. May be set anew between runs.
        on_step: Called before each step, for example to tell a watchdog.

    Attributes:
        schedule: Schedule that is run.
        pipeline_rank: Index of the row that is run here.

    Raises:
        ScheduleError: If the schedule is not valid.
        ValueError: If stages, schedule and transport do not fit each other.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        schedule: Schedule,
        *,
        pipeline_rank: int,
        transport: Transport[tuple[Tensor, ...]] | None = None,
        loss_fn: LossFunction | None = None,
        loss_scale: float = 1.0,
        sharding: StageSharding | None = None,
        shared_parameters: SharedParameters | None = None,
        args_batch_dim: BatchDims | None = None,
        kwargs_batch_dim: Mapping[str, int | None] | None = None,
        target_batch_dim: int | None = 0,
        output_concat_dim: int = 0,
        return_outputs: bool | None = None,
        on_step: Callable[[MetaStep], None] | None = None,
    ) -> None:
        self.loss_scale = loss_scale
        self.return_outputs = return_outputs
        self._stages = {stage.stage_index: stage for stage in stages}
        self.schedule = schedule
        self.pipeline_rank = pipeline_rank
        self._transport = transport
        self._loss_fn = loss_fn
        self._sharding = sharding
        self._shared = shared_parameters
        self._batch_dims = (args_batch_dim, kwargs_batch_dim, target_batch_dim)
        self._concat_dim = output_concat_dim
        self._on_step = on_step
        self._custom: dict[MetaStepType, CustomFunction] = {}
        self._expectations = Expectations()
        self._check()

    @cached_property
    def _forward_part(self) -> Schedule:
        return forward_part(self.schedule)

    def register_custom_function(self, step_type: MetaStepType, fn: CustomFunction) -> None:
        """Run `fn(step, context)` instead of the built-in code for every step of a type.

        For example OVERLAP_B_F, to run its halves at the same time: the inputs of both are there
        when the function is called. Registering again replaces the function.
        """
        self._custom[step_type] = fn

    def run(
        self, *args: object, target: object = None, record: bool = True, **kwargs: object
    ) -> PipelineResult:
        """Cut a batch into microbatches and run the schedule once; parameter gradients accumulate.

        Args:
            *args: Arguments of the first stage; none elsewhere.
            target: Second argument of the loss function; only needed where the last stage is.
            record: Whether to record the timeline.
            **kwargs: Keyword arguments of every stage's module.

        Returns:
            Same as `run_microbatches`, which lists the errors too.
        """
        return self._run(
            self.schedule, lambda: self._batch(*self._cut(args, kwargs, target)), record=record
        )

    def evaluate(
        self, *args: object, target: object = None, record: bool = False, **kwargs: object
    ) -> PipelineResult:
        """Run the forwards alone, without gradients, and return losses and outputs.

        Every rank calls it. Modules stay in their mode (`Module.train`, `Module.eval`).
        """
        return self._run(
            self._forward_part,
            lambda: self._batch(*self._cut(args, kwargs, target), training=False),
            record=record,
        )

    def evaluate_microbatches(
        self,
        args: Sequence[Sequence[object]],
        kwargs: Sequence[Mapping[str, object]] | None = None,
        targets: Sequence[object] | None = None,
        *,
        record: bool = False,
    ) -> PipelineResult:
        """Evaluate a batch that is cut already; see `evaluate` and `run_microbatches`."""
        return self._run(
            self._forward_part,
            lambda: self._batch(args, kwargs, targets, training=False),
            record=record,
        )

    def run_microbatches(
        self,
        args: Sequence[Sequence[object]],
        kwargs: Sequence[Mapping[str, object]] | None = None,
        targets: Sequence[object] | None = None,
        *,
        record: bool = True,
    ) -> PipelineResult:
        """Run the schedule once over its microbatches; parameter gradients accumulate.

        With several chains, entry ``c * num_microbatches + m`` belongs to microbatch m of chain c.

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
                step, and one that tells where it began if that was on another rank. This rank's
                connections are closed then, so that the other ranks fail too instead of waiting;
                the runtime cannot be used again.
        """
        return self._run(self.schedule, lambda: self._batch(args, kwargs, targets), record=record)

    def _run(
        self, schedule: Schedule, batch: Callable[[], Batch], *, record: bool
    ) -> PipelineResult:
        device = next(iter(self._stages.values())).device
        recorder = Recorder(self.pipeline_rank, device) if record else None
        keep = schedule.is_forward_only if self.return_outputs is None else self.return_outputs
        executor: Executor | None = None
        shared = None if schedule.is_forward_only else self._shared
        try:
            driver = StageDriver(
                rank=self.pipeline_rank,
                schedule=schedule,
                stages=self._stages,
                transport=self._transport,
                expectations=self._expectations,
                sharding=self._sharding,
                shared=shared,
                loss_fn=self._loss_fn,
                batch=batch(),
                keep_outputs=keep,
                recorder=recorder,
            )
            executor = Executor(
                schedule.steps[self.pipeline_rank],
                driver,
                handlers={kind: _bind(kind, fn, driver) for kind, fn in self._custom.items()},
                on_step=self._on_step,
            )
            with (
                nullcontext() if shared is None else shared.accumulating(),
                nullcontext() if self._sharding is None else self._sharding.during_run(),
            ):
                executor.advance()
                driver.finish()
        except BaseException as error:
            raised = self._give_up(error, executor)
            if raised is error:
                raise
            raise raised from error
        return PipelineResult(
            [loss for _, loss in sorted(driver.losses.items())],
            [driver.outputs[entry] for entry in sorted(driver.outputs)],
            timeline=Timeline if recorder is None else recorder.timeline,
            concat_dim=self._concat_dim,
        )

    def _give_up(self, error: BaseException, executor: Executor | None) -> BaseException:
        """Note the place of an error in it, fail the other ranks, and return the error to raise."""
        where = self._where(executor)
        error.add_note(where)
        mark_place(error, where.removeprefix(f"rank {self.pipeline_rank}").lstrip(":, "))
        raised = error if self._transport is None else self._transport.abort(error)
        if raised is not error:
            raised.add_note(where)
        if self._shared is not None:
            self._shared.close()
        return raised

    def _cut(
        self, args: Sequence[object], kwargs: Mapping[str, object], target: object
    ) -> tuple[Sequence[Sequence[object]], Sequence[Mapping[str, object]], Sequence[object] | None]:
        num = self._num_entries
        args_dims, kwargs_dims, target_dim = self._batch_dims
        cut = split_args(args, num, dims=args_dims if args else None)
        targets = None if target is None else split_args([target], num, dims=[target_dim])
        return (
            cut,
            split_kwargs(kwargs, num, dims=kwargs_dims),
            None if targets is None else [part for (part,) in targets],
        )

    def _batch(
        self,
        args: Sequence[Sequence[object]],
        kwargs: Sequence[Mapping[str, object]] | None,
        targets: Sequence[object] | None,
        *,
        training: bool = True,
    ) -> Batch:
        num = self._num_entries
        batch = Batch(
            args=args,
            kwargs=[{}] * num if kwargs is None else kwargs,
            targets=() if targets is None else targets,
            loss_scale=self.loss_scale,
        )
        for name, given in (("args", args), ("kwargs", batch.kwargs), ("targets", targets)):
            if given is not None and len(given) != num:
                raise ValueError(f"len({name}) ({len(given)}) must equal num_microbatches ({num})")
        has_end = any(self.schedule.downstream[stage] < 0 for stage in self._stages)
        needs_targets = training and not self.schedule.is_forward_only
        if targets is None and has_end and needs_targets and self._loss_fn is not None:
            raise ValueError("targets (None) must be given to train the last stage")
        return batch

    @property
    def _num_entries(self) -> int:
        return len(self.schedule.chains) * self.schedule.num_microbatches

    def _where(self, executor: Executor | None) -> str:
        if executor is None:
            return f"rank {self.pipeline_rank}: before the first step"
        step = executor.step
        if step is None:
            return f"rank {self.pipeline_rank}: after the last step"
        parts = [f"rank {self.pipeline_rank}"]
        for leaf in step.leaves():
            parts.append(f"stage {leaf.stage_index}")
            if leaf.microbatch_index is not None:
                parts.append(f"microbatch {leaf.microbatch_index}")
        return f"{', '.join(parts)}: in step {step} (cell {executor.position} of the schedule)"

    def _check(self) -> None:
        schedule = self.schedule
        if not 0 <= self.pipeline_rank < schedule.num_ranks:
            raise ValueError(
                f"pipeline_rank ({self.pipeline_rank}) must be >= 0 and < num_ranks "
                f"({schedule.num_ranks})"
            )
        placed = list(schedule.stages_of(self.pipeline_rank))
        if sorted(self._stages) != placed:
            raise ValueError(
                f"stages ({sorted(self._stages)}) must be those that the schedule places on rank "
                f"{self.pipeline_rank} ({placed})"
            )
        for stage in self._stages.values():
            if stage.num_stages != schedule.num_stages:
                raise ValueError(
                    f"num_stages ({stage.num_stages}) of stage {stage.stage_index} must equal the "
                    f"schedule's ({schedule.num_stages})"
                )
            given = stage.input_spec is not None or stage.is_planned[0]
            if schedule.upstream[stage.stage_index] < 0 and given:
                raise ValueError(
                    f"input_spec ({stage.input_spec}) of stage {stage.stage_index} must be None: "
                    "it receives nothing"
                )
        if schedule.edges and self._transport is None:
            raise ValueError("transport (None) must be given for a schedule with messages")
        check_sharding(self._stages.values(), schedule, self._sharding)
        validate(schedule, communication=bool(schedule.edges)).raise_if_failed()


def _bind(kind: MetaStepType, fn: CustomFunction, driver: StageDriver) -> Handler:
    def run(step: MetaStep) -> None:
        fn(step, driver.context)

    def overlap(step: MetaStep) -> None:
        driver.run_overlap(step, lambda: run(step))

    return overlap if kind.is_overlap else run


def forward_part(schedule: Schedule) -> Schedule:
    """Return a schedule without its backwards, the other steps in the same order.

    No forward waits for a step that is dropped, so a sound schedule stays sound. Parameters are
    gathered where a forward follows before they are freed, and not elsewhere.
    """
    return schedule.with_rows(_forward_row(row.codes()) for row in schedule.steps)


def _forward_row(codes: list[int]) -> Iterator[int]:
    used = _spans_with_forward(codes)
    for position, code in enumerate(codes):
        if position in used:
            yield code
        for part in leaves(code) if code >= 0 else ():
            if part & KIND_MASK in _KEPT:
                yield part


def _spans_with_forward(codes: list[int]) -> set[int]:
    """Return the positions of the gathers and frees that have a forward of the stage between."""
    found: set[int] = set()
    gathered: dict[int, int] = {}
    for position, code in enumerate(codes):
        for part in leaves(code) if code >= 0 else ():
            kind, stage = part & KIND_MASK, part >> STAGE_SHIFT & STAGE_MASK
            if kind == FSDP_UNSHARD:
                gathered[stage] = position
            elif kind == FWD and stage in gathered:
                found.add(gathered[stage])
            elif kind == FSDP_RESHARD and gathered.pop(stage, -1) in found:
                found.add(position)
    return found
