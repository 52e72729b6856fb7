"""The torch machine behind the executor: one rank's stages during one run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial

import torch
from torch import Tensor

from hp_platform import doing
from hp_schedule.executor import actions_of
from hp_schedule.runtime.batch import (
    Batch,
    Chunk,
    GradientPaths,
    Key,
    LossFunction,
    PipelineContext,
    Recorder,
)
from hp_schedule.runtime.fsdp import StageSharding
from hp_schedule.runtime.p2p import Expectations, PointToPoint
from hp_schedule.runtime.retention import Recomputation, SavedTensors
from hp_schedule.runtime.shared import SharedParameters
from hp_schedule.runtime.specs import Specs, TensorSpec, check_expected
from hp_schedule.runtime.stage import Grads, PipelineStage, WeightBackward, nothing
from hp_schedule.schedule import Schedule
from hp_schedule.steps import KIND, MetaStep, MetaStepType
from hp_schedule.transport import Transport


class StageDriver:
    """Runs steps of one rank on torch; implements `hp_schedule.Driver`.

    All state is keyed by stage and microbatch and lives as long as the run, so a handler may run
    steps of different microbatches from several threads. Nothing in it refers back to it, so that
    its tensors, the batch above all, are freed with the run without a garbage collection.

    Args:
        rank: Rank in the pipeline.
        schedule: Schedule that is run.
        stages: This rank's stages by index.
        transport: Moves messages; None if the schedule has none.
        expectations: Input specs of the stages after this rank's; the same object in every run.
        sharding: Does the FSDP steps; None leaves them to registered functions.
        shared: Parameters that several stages have; keeps their gradients apart by stage.
        loss_fn: Applied to the output of a chain's last stage; None: that output is the loss.
        batch: The microbatches.
        keep_outputs: Whether to keep what the last stages return, detached.
        recorder: Recorder of every span; None records nothing.

    Attributes:
        losses: Detached losses, by entry of the batch.
        outputs: Outputs of the last stages, by entry of the batch.
    """

    def __init__(
        self,
        *,
        rank: int,
        schedule: Schedule,
        stages: Mapping[int, PipelineStage],
        transport: Transport[tuple[Tensor, ...]] | None,
        expectations: Expectations,
        sharding: StageSharding | None,
        shared: SharedParameters | None,
        loss_fn: LossFunction | None,
        batch: Batch,
        keep_outputs: bool,
        recorder: Recorder | None,
    ) -> None:
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, object] = {}
        self._schedule = schedule
        self._stages = stages
        self._sharding = sharding
        self._shared = shared
        self._loss_fn = loss_fn
        self._batch = batch
        self._keep_outputs = keep_outputs
        self._recorder = recorder
        self._in_overlap = False
        self._any_graph = False
        self._rank = rank
        self._training = not schedule.is_forward_only
        self._recomputed, self._offloaded = schedule.recomputed, schedule.offloaded
        self._paths = GradientPaths()
        self._chunks: dict[Key, Chunk] = {}
        # What waits on this rank for the step that takes it, by stage and microbatch.
        self._inputs: dict[Key, tuple[Tensor, ...]] = {}  # leaves for the backward
        self._output_grads: dict[Key, Grads] = {}  # one per output, None where nothing reached one
        self._outgoing: dict[Key, tuple[Tensor, ...]] = {}  # outputs to be sent, with their graphs
        self._outgoing_grads: dict[Key, tuple[Tensor, ...]] = {}
        self._weight_grads: dict[Key, WeightBackward] = {}  # second halves of backwards
        self._repeats: dict[Key, Recomputation] = {}  # forwards that are to be run again
        self._kept: dict[Key, SavedTensors] = {}  # what forwards keep that is to be copied away
        self._first_entry = {
            stage: number * schedule.num_microbatches
            for number, chain in enumerate(schedule.chains)
            for stage in chain
        }
        self._p2p: PointToPoint | None = None
        if transport is not None:
            self._p2p = PointToPoint(
                rank=rank,
                schedule=schedule,
                stages=stages,
                transport=transport,
                expectations=expectations,
                output_specs=partial(_output_specs, self._chunks),
            )

    @property
    def context(self) -> PipelineContext:
        """Return the context that a registered function gets."""
        return PipelineContext(
            rank=self._rank,
            schedule=self._schedule,
            stages=self._stages,
            batch=self._batch,
            losses=self.losses,
            run=self.run,
            wait_inputs=self.wait_inputs,
        )

    def ready(self, step_type: MetaStepType, stage_index: int, microbatch_index: int) -> bool:
        """Return True: steps wait for their inputs themselves."""
        del step_type, stage_index, microbatch_index
        return True

    def forward(self, stage_index: int, microbatch_index: int) -> None:
        """Run a forward, and at the end of a chain the loss."""
        stage, key = self._ready_stage(stage_index), (stage_index, microbatch_index)
        entry = self._first_entry[stage_index] + microbatch_index
        self._wait_input(key)
        received = self._inputs.pop(key, None)
        args = self._batch.args[entry] if received is None else received
        grad_mode: AbstractContextManager[object] = torch.enable_grad()
        if not self._training:
            grad_mode = torch.no_grad()
        elif key in self._recomputed or key in self._offloaded:
            grad_mode = self._keeping(stage, key, (args, self._batch.kwargs[entry]))
        is_last = self._schedule.downstream[stage_index] < 0
        with self._span(MetaStepType.FWD, key), grad_mode:
            output = stage.forward_one_chunk(args, self._batch.kwargs[entry])
            outputs = self._finish_chain(output, entry) if is_last else stage.tensors_of(output)
        if key in self._repeats:
            del output
            outputs = tuple([x.detach().requires_grad_(x.requires_grad) for x in outputs])
        elif key in self._kept:
            self._kept[key].stay(outputs)
        if self._training:
            self._chunks[key] = Chunk(received or (), outputs)
        if not is_last:
            self._pass_outputs(key, outputs)

    def backward(self, stage_index: int, microbatch_index: int) -> None:
        """Run a backward of inputs and weights."""
        self._run_backward(MetaStepType.BWD, (stage_index, microbatch_index))

    def backward_input(self, stage_index: int, microbatch_index: int) -> None:
        """Run a backward whose weight gradients are put off where the stage can."""
        self._run_backward(MetaStepType.BWD_INPUT, (stage_index, microbatch_index))

    def backward_weight(self, stage_index: int, microbatch_index: int) -> None:
        """Compute the weight gradients that were put off."""
        key = (stage_index, microbatch_index)
        stage, finish = self._ready_stage(stage_index), self._weight_grads.pop(key)
        with (
            self._span(MetaStepType.BWD_WEIGHT, key),
            _without_autocast(stage),
            self._apart(stage_index),
        ):
            finish()

    def recompute(self, stage_index: int, microbatch_index: int) -> None:
        """Run a forward again that has saved nothing, for the backward that follows."""
        stage, key = self._ready_stage(stage_index), (stage_index, microbatch_index)
        entry = self._first_entry[stage_index] + microbatch_index
        chunk, repeat = self._chunks[key], self._repeats.pop(key)
        is_start = self._schedule.upstream[stage_index] < 0
        args = self._batch.args[entry] if is_start else chunk.received
        is_last = self._schedule.downstream[stage_index] < 0
        with self._span(MetaStepType.RECOMPUTE, key), torch.enable_grad(), repeat.second_run():
            output = stage.forward_one_chunk(args, self._batch.kwargs[entry])
            outputs = self._finish_chain(output, entry) if is_last else stage.tensors_of(output)
        self._chunks[key] = Chunk(chunk.received, outputs)

    def offload(self, stage_index: int, microbatch_index: int) -> None:
        """Start to copy the tensors that autograd has saved for a backward to the host."""
        self._kept[stage_index, microbatch_index].offload()

    def reload(self, stage_index: int, microbatch_index: int) -> None:
        """Start to copy them back from the host."""
        self._kept[stage_index, microbatch_index].reload()

    def overlap(self, step: MetaStep) -> None:
        """Run the halves one after the other; a registered function can do better."""

        def run_halves() -> None:
            for half in step.sub_steps:
                self.run(half)

        self.run_overlap(step, run_halves)

    def run_overlap(self, step: MetaStep, run_halves: Callable[[], None]) -> None:
        """Wait for the inputs of both halves, then run them, as one span of the timeline."""
        if self._in_overlap:  # a registered function has the whole step run
            run_halves()
            return
        self.wait_inputs(step)
        start = None if self._recorder is None else self._recorder.mark()
        self._in_overlap = True
        run_halves()
        self._in_overlap = False
        if self._recorder is not None and start is not None:
            self._recorder.add(step, start)

    def send_forward(self, stage_index: int, microbatch_index: int) -> None:
        """Start to send an output."""
        values = self._outgoing.pop((stage_index, microbatch_index))
        self._messages.send_input(stage_index, microbatch_index, values)

    def send_backward(self, stage_index: int, microbatch_index: int) -> None:
        """Start to send input gradients."""
        values = self._outgoing_grads.pop((stage_index, microbatch_index))
        self._messages.send_gradient(stage_index, microbatch_index, values)

    def receive_forward(self, stage_index: int, microbatch_index: int) -> None:
        """Post the receive of an input."""
        self._messages.want_input(stage_index, microbatch_index)

    def receive_backward(self, stage_index: int, microbatch_index: int) -> None:
        """Post the receive of output gradients."""
        self._messages.want_gradient(stage_index, microbatch_index)

    def unshard(self, stage_index: int) -> None:
        """Start to gather a stage's parameters."""
        self._sharder(MetaStepType.FSDP_UNSHARD, stage_index).unshard(self._stages[stage_index])

    def reshard(self, stage_index: int) -> None:
        """Free a stage's gathered parameters."""
        self._sharder(MetaStepType.FSDP_RESHARD, stage_index).reshard(self._stages[stage_index])

    def reduce_grad(self, stage_index: int) -> None:
        """Reduce a stage's gradients."""
        sharder = self._sharder(MetaStepType.FSDP_REDUCE_GRAD, stage_index)
        sharder.reduce_grad(self._stages[stage_index])

    def run(self, step: MetaStep) -> None:
        """Run one step, whatever its type, the built-in way."""
        if step.sub_steps:
            self.overlap(step)
            return
        action = actions_of(self)[KIND[step.type]]
        action(step.stage_index or 0, step.microbatch_index or 0)

    def wait_inputs(self, step: MetaStep) -> None:
        """Wait until the inputs of a compute step are on this rank."""
        for leaf in step.leaves():
            key = (leaf.stage_index or 0, leaf.microbatch_index or 0)
            if leaf.type is MetaStepType.FWD:
                self._wait_input(key)
            elif leaf.type in (MetaStepType.BWD, MetaStepType.BWD_INPUT):
                self._wait_output_grads(key)

    def finish(self) -> None:
        """Wait until everything that was sent has arrived.

        Raises:
            ValueError: If losses were computed for backwards, and none has a graph.
        """
        if self._training and self.losses and not self._any_graph:
            raise ValueError(
                "losses must require grad to train, but none of this run does (is inference mode "
                "on, or the loss detached?)"
            )
        if self._p2p is not None:
            self._p2p.finish()

    def _finish_chain(self, output: object, entry: int) -> tuple[Tensor, ...]:
        """Store output and loss of a chain; return the tensors that the backward starts from."""
        if self._keep_outputs:
            self.outputs[entry] = _detached(output)
        # Without a loss function what the stage returns in training is the loss.
        if not (self._training if self._loss_fn is None else len(self._batch.targets)):
            return ()
        loss = (
            output if self._loss_fn is None else self._loss_fn(output, self._batch.targets[entry])
        )
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss ({shown}) must be a scalar")
        self.losses[entry] = loss.detach()
        self._any_graph |= loss.requires_grad
        return (loss,)

    def _run_backward(self, step_type: MetaStepType, key: Key) -> None:
        stage = self._ready_stage(key[0])
        self._wait_output_grads(key)
        if key in self._kept:
            self._kept.pop(key).wait()
        chunk = self._chunks.pop(key)
        grads = self._output_grads.pop(key, None)
        if grads is None:
            grads = tuple([torch.full_like(x, self._batch.loss_scale) for x in chunk.outputs])
        starts = [
            (x, grad)
            for x, grad in zip(chunk.outputs, grads, strict=True)
            if grad is not None and x.requires_grad
        ]
        arguments = list(zip(*starts, strict=True)) or [(), ()]
        inputs = [x for x in chunk.received if x.requires_grad]
        with self._span(step_type, key), _without_autocast(stage), self._apart(key[0]):
            if step_type is MetaStepType.BWD:
                found = stage.backward_one_chunk(*arguments, inputs=inputs)
            elif starts:
                found, later = stage.backward_input_one_chunk(*arguments, inputs=inputs)
                self._weight_grads[key] = later
            else:
                found = (None,) * len(inputs)
                self._weight_grads[key] = nothing
        if self._schedule.upstream[key[0]] >= 0:
            self._pass_input_grads(key, chunk.received, found)

    def _wait_input(self, key: Key) -> None:
        """Wait for the input of a stage and store it as leaves, unless it starts a chain."""
        if self._schedule.upstream[key[0]] < 0 or key in self._inputs:
            return
        with self._span(MetaStepType.FWD_RECV, key):
            tensors, specs = self._messages.take_input(*key)
        self._inputs[key] = tuple(
            spec.laid_out(x).requires_grad_(self._training and spec.has_grad)
            for x, spec in zip(tensors, specs, strict=True)
        )

    def _wait_output_grads(self, key: Key) -> None:
        """Wait for the gradients of a stage's outputs and store them, unless it ends a chain."""
        if self._schedule.downstream[key[0]] < 0 or key in self._output_grads:
            return
        with self._span(MetaStepType.BWD_RECV, key):
            self._output_grads[key] = self._messages.take_gradient(*key)

    @contextmanager
    def _keeping(self, stage: PipelineStage, key: Key, passed: Sequence[object]) -> Iterator[None]:
        """Save nothing for the backward of a forward inside, or tensors that can be moved."""
        if key in self._recomputed:
            repeat = self._repeats[key] = stage.recomputation()
            keeping: AbstractContextManager[None] = repeat.first_run()
        else:
            kept = self._kept[key] = stage.saved_tensors(passed)
            keeping = kept.saving()
        with torch.enable_grad(), keeping:
            yield

    def _apart(self, stage: int) -> AbstractContextManager[None]:
        return nullcontext() if self._shared is None else self._shared.of_stage(stage)

    def _expected(self, key: Key, outputs: tuple[Tensor, ...]) -> Specs | None:
        after = self._stages.get(self._schedule.downstream[key[0]])
        return self._messages.expected(*key, outputs) if after is None else after.received(key[1])

    def _pass_outputs(self, key: Key, outputs: tuple[Tensor, ...]) -> None:
        after = self._schedule.downstream[key[0]]
        if self._training:
            self._paths.check(*key, outputs, expected=partial(self._expected, key, outputs))
        if after in self._stages:
            stage = self._stages[after]
            expected = stage.input_spec or stage.received(key[1])
            if expected is not None:
                check_expected(outputs, expected, stage=key[0], microbatch=key[1], after=after)
            self._inputs[after, key[1]] = tuple(
                spec.laid_out(x.detach()).requires_grad_(x.requires_grad and spec.has_grad)
                for x, spec in zip(outputs, expected or map(TensorSpec.of, outputs), strict=True)
            )
        else:
            self._outgoing[key] = outputs
            if self._training:
                self._messages.progress()

    def _pass_input_grads(self, key: Key, received: tuple[Tensor, ...], found: Grads) -> None:
        grads = iter(found)
        before = self._schedule.upstream[key[0]]
        aligned = [next(grads) if x.requires_grad else None for x in received]
        if before in self._stages:
            self._output_grads[before, key[1]] = tuple(aligned)
        else:
            self._outgoing_grads[key] = tuple(
                torch.zeros_like(x) if grad is None else grad
                for x, grad in zip(received, aligned, strict=True)
                if x.requires_grad
            )

    def _ready_stage(self, stage_index: int) -> PipelineStage:
        """Return a stage that is about to compute, its parameters gathered."""
        stage = self._stages[stage_index]
        if self._sharding is not None:
            self._sharding.wait_unshard(stage)
        return stage

    def _sharder(self, step_type: MetaStepType, stage_index: int) -> StageSharding:
        if self._sharding is None:
            raise RuntimeError(
                f"stage {stage_index}: a function must be registered for {step_type.name} "
                "(register_custom_function), or sharding given"
            )
        return self._sharding

    @property
    def _messages(self) -> PointToPoint:
        if self._p2p is None:
            raise RuntimeError("transport must be given for a schedule with messages")
        return self._p2p

    @contextmanager
    def _span(self, step_type: MetaStepType, key: Key) -> Iterator[None]:
        step, words = _described(step_type, *key)
        recorder = None if self._in_overlap else self._recorder
        with doing(words):
            start = None if recorder is None else recorder.mark()
            yield
            if recorder is not None and start is not None:
                recorder.add(step, start)


@lru_cache(maxsize=1 << 16)  # every run of a schedule has the same steps
def _described(step_type: MetaStepType, stage: int, microbatch: int) -> tuple[MetaStep, str]:
    """Return a step of one stage, and its description."""
    step = MetaStep(step_type, stage, microbatch)
    return step, f"stage {stage}, microbatch {microbatch}: in step {step}"


def _output_specs(chunks: Mapping[Key, Chunk], stage: int, microbatch: int) -> Specs | None:
    chunk = chunks.get((stage, microbatch))
    return None if chunk is None else tuple(map(TensorSpec.of, chunk.outputs))


def _without_autocast(stage: PipelineStage) -> AbstractContextManager[None]:
    """Run a backward as outside of autocast, which is where it belongs.

    The caller can only put all of a run under autocast. Operations of the backward would then be
    cast once more, also those of layers that had switched it off.
    """
    kind = stage.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _detached(output: object) -> object:
    if isinstance(output, Tensor):
        return output.detach()
    if isinstance(output, (tuple, list)):
        return tuple(_detached(part) for part in output)
    if isinstance(output, dict):
        return {name: _detached(part) for name, part in output.items()}
    return output
