"""The torch machine behind the executor: one rank's stages during one run."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hp_platform import WeightGradQueue
from hp_schedule.ir import MetaStep, MetaStepType
from hp_schedule.runtime.recorder import Recorder
from hp_schedule.runtime.stage import PipelineStage, TensorSpec
from hp_schedule.schedule import Schedule
from hp_schedule.transport import Message, Transport

LossFunction = Callable[[Tensor, Any], Tensor]

_Key = tuple[int, int]
"""Stage and microbatch."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What a run is given, all by microbatch.

    Attributes:
        args: Positional arguments of the first stage; unused on ranks without it.
        kwargs: Keyword arguments of every stage.
        targets: Second argument of the loss function; unused on ranks without the last stage.
    """

    args: Sequence[Sequence[Any]]
    kwargs: Sequence[Mapping[str, Any]]
    targets: Sequence[Any]


@dataclass(slots=True)
class Chunk:
    """What lives from the forward of a microbatch in a stage to its backward.

    Attributes:
        received: The stage's input, a leaf; None for the first stage.
        output: The output, or the loss after the last stage; graph included.
    """

    received: Tensor | None
    output: Tensor


@dataclass(slots=True)
class _Values:
    """Values on this rank that wait for the step that takes them."""

    inputs: dict[_Key, Tensor] = field(default_factory=dict)
    output_grads: dict[_Key, Tensor] = field(default_factory=dict)
    outgoing: dict[Message, Tensor] = field(default_factory=dict)


class StageDriver:
    """Runs steps of one rank on torch; implements `hp_schedule.Driver`.

    All state is keyed by stage and microbatch and lives as long as the run, so a handler may run
    steps of different microbatches from several threads.

    Args:
        rank: Of the pipeline.
        schedule: What is run.
        stages: This rank's stages by index.
        transport: Moves messages; None if the schedule has none.
        loss_fn: Applied to the last stage's output; None leaves losses out.
        batch: The microbatches.
        recorder: Told of every span; None records nothing.
    """

    def __init__(
        self,
        *,
        rank: int,
        schedule: Schedule,
        stages: Mapping[int, PipelineStage],
        transport: Transport[Tensor] | None,
        loss_fn: LossFunction | None,
        batch: Batch,
        recorder: Recorder | None,
    ) -> None:
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self._rank = rank
        self._schedule = schedule
        self._stages = stages
        self._transport = transport
        self._loss_fn = loss_fn
        self._batch = batch
        self._recorder = recorder
        self._training = not schedule.is_forward_only
        self._chunks: dict[_Key, Chunk] = {}
        self._values = _Values()
        self._weight_grads = WeightGradQueue()

    def ready(self, step_type: MetaStepType, stage_index: int, microbatch_index: int) -> bool:
        """Say True: steps wait for their inputs themselves."""
        del step_type, stage_index, microbatch_index
        return True

    def forward(self, stage_index: int, microbatch_index: int) -> None:
        """Run a forward, and after the last stage the loss."""
        stage = self._stages[stage_index]
        received = self._take_input(stage, microbatch_index)
        args = self._batch.args[microbatch_index] if received is None else (received,)
        kwargs = self._batch.kwargs[microbatch_index]
        grad_mode = torch.enable_grad() if self._training else torch.no_grad()
        with self._span(MetaStepType.FWD, stage_index, microbatch_index), grad_mode:
            output = stage.forward_one_chunk(args, kwargs)
            if stage.is_last:
                output = self._finish_forward(output, microbatch_index)
        if not stage.is_last:
            self._pass_output(stage_index, microbatch_index, output.detach())
        if self._training:
            self._chunks[stage_index, microbatch_index] = Chunk(received, output)

    def backward(self, stage_index: int, microbatch_index: int) -> None:
        """Run a backward of input and weights."""
        self._run_backward(MetaStepType.BWD, stage_index, microbatch_index)

    def backward_input(self, stage_index: int, microbatch_index: int) -> None:
        """Run a backward whose weight gradients are put off where the layers can."""
        with self._weight_grads.defer((stage_index, microbatch_index)):
            self._run_backward(MetaStepType.BWD_INPUT, stage_index, microbatch_index)

    def backward_weight(self, stage_index: int, microbatch_index: int) -> None:
        """Compute the weight gradients that were put off."""
        with self._span(MetaStepType.BWD_WEIGHT, stage_index, microbatch_index):
            self._weight_grads.flush((stage_index, microbatch_index))

    def overlap(self, step: MetaStep) -> None:
        """Run the halves one after the other; a registered function can do better."""
        for half in step.sub_steps:
            self.run(half)

    def send_forward(self, stage_index: int, microbatch_index: int) -> None:
        """Start to send an output."""
        message = self._message(MetaStepType.FWD_SEND, stage_index, microbatch_index)
        self._network.send(message, self._values.outgoing.pop(message))

    def send_backward(self, stage_index: int, microbatch_index: int) -> None:
        """Start to send an input gradient."""
        message = self._message(MetaStepType.BWD_SEND, stage_index, microbatch_index)
        self._network.send(message, self._values.outgoing.pop(message))

    def receive_forward(self, stage_index: int, microbatch_index: int) -> None:
        """Post the receive of an input."""
        stage = self._stages[stage_index]
        if stage.input_spec is None:
            raise ValueError(f"input_spec of stage {stage_index} must be given")
        message = self._message(MetaStepType.FWD_RECV, stage_index, microbatch_index)
        self._network.post_receive(message, stage.input_spec.empty(stage.device))

    def receive_backward(self, stage_index: int, microbatch_index: int) -> None:
        """Post the receive of an output gradient."""
        stage = self._stages[stage_index]
        chunk = self._chunks.get((stage_index, microbatch_index))
        spec = stage.output_spec if chunk is None else TensorSpec.of(chunk.output)
        if spec is None:
            raise ValueError(
                f"output_spec of stage {stage_index} must be given to post "
                f"{stage_index}RECV_B{microbatch_index} before its forward"
            )
        message = self._message(MetaStepType.BWD_RECV, stage_index, microbatch_index)
        self._network.post_receive(message, spec.empty(stage.device))

    def unshard(self, stage_index: int) -> None:
        """Refuse: a function must be registered for FSDP steps."""
        raise _unregistered(MetaStepType.FSDP_UNSHARD, stage_index)

    def reshard(self, stage_index: int) -> None:
        """Refuse: a function must be registered for FSDP steps."""
        raise _unregistered(MetaStepType.FSDP_RESHARD, stage_index)

    def reduce_grad(self, stage_index: int) -> None:
        """Refuse: a function must be registered for FSDP steps."""
        raise _unregistered(MetaStepType.FSDP_REDUCE_GRAD, stage_index)

    def run(self, step: MetaStep) -> None:
        """Run one step, whatever its type, the built-in way."""
        if step.sub_steps:
            self.overlap(step)
        elif step.type.is_fsdp:
            raise _unregistered(step.type, step.stage_index or 0)
        else:
            actions = {
                MetaStepType.FWD: self.forward,
                MetaStepType.BWD: self.backward,
                MetaStepType.BWD_INPUT: self.backward_input,
                MetaStepType.BWD_WEIGHT: self.backward_weight,
                MetaStepType.FWD_SEND: self.send_forward,
                MetaStepType.FWD_RECV: self.receive_forward,
                MetaStepType.BWD_SEND: self.send_backward,
                MetaStepType.BWD_RECV: self.receive_backward,
            }
            actions[step.type](step.stage_index or 0, step.microbatch_index or 0)

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        if self._transport is not None:
            self._transport.finish()

    def _finish_forward(self, output: Tensor, microbatch: int) -> Tensor:
        """Keep output and loss of the last stage; return what the backward starts from."""
        if not self._training:
            self.outputs[microbatch] = output
        if self._loss_fn is None or not self._batch.targets:
            return output
        loss = self._loss_fn(output, self._batch.targets[microbatch])
        if loss.numel() != 1:
            raise ValueError(f"loss ({list(loss.shape)}) must be a scalar")
        self.losses[microbatch] = loss.detach()
        return loss

    def _run_backward(self, step_type: MetaStepType, stage_index: int, microbatch: int) -> None:
        stage = self._stages[stage_index]
        grad = None if stage.is_last else self._take_output_grad(stage_index, microbatch)
        chunk = self._chunks.pop((stage_index, microbatch))
        with self._span(step_type, stage_index, microbatch):
            result = stage.backward_one_chunk(chunk.output, grad, received=chunk.received)
        if result is not None:
            self._pass_input_grad(stage_index, microbatch, result)

    def _take_input(self, stage: PipelineStage, microbatch: int) -> Tensor | None:
        if stage.is_first:
            return None
        key = (stage.stage_index, microbatch)
        value = self._values.inputs.pop(key, None)
        if value is None:
            message = self._message(MetaStepType.FWD_RECV, *key)
            value = self._wait(message, MetaStepType.FWD_RECV, key)
        wants_grad = value.is_floating_point() or value.is_complex()
        return value.requires_grad_(self._training and wants_grad)

    def _take_output_grad(self, stage_index: int, microbatch: int) -> Tensor:
        key = (stage_index, microbatch)
        value = self._values.output_grads.pop(key, None)
        if value is None:
            message = self._message(MetaStepType.BWD_RECV, *key)
            value = self._wait(message, MetaStepType.BWD_RECV, key)
            # The gradient of an output can only have come from a rank that has the output.
            self._network.release_send(self._message(MetaStepType.FWD_SEND, *key))
        return value

    def _pass_output(self, stage_index: int, microbatch: int, value: Tensor) -> None:
        after = self._schedule.downstream[stage_index]
        if after in self._stages:
            self._values.inputs[after, microbatch] = value
        else:
            message = self._message(MetaStepType.FWD_SEND, stage_index, microbatch)
            self._values.outgoing[message] = value

    def _pass_input_grad(self, stage_index: int, microbatch: int, value: Tensor) -> None:
        before = self._schedule.upstream[stage_index]
        if before in self._stages:
            self._values.output_grads[before, microbatch] = value
        else:
            message = self._message(MetaStepType.BWD_SEND, stage_index, microbatch)
            self._values.outgoing[message] = value

    def _message(self, step_type: MetaStepType, stage: int, microbatch: int) -> Message:
        """Return the message of a send or receive step."""
        before, after = self._schedule.upstream[stage], self._schedule.downstream[stage]
        place = self._schedule.stage_to_rank
        if step_type is MetaStepType.FWD_SEND:
            return Message(self._rank, place[after], after, microbatch, is_gradient=False)
        if step_type is MetaStepType.FWD_RECV:
            return Message(place[before], self._rank, stage, microbatch, is_gradient=False)
        if step_type is MetaStepType.BWD_SEND:
            return Message(self._rank, place[before], before, microbatch, is_gradient=True)
        return Message(place[after], self._rank, stage, microbatch, is_gradient=True)

    def _wait(self, message: Message, step_type: MetaStepType, key: _Key) -> Tensor:
        try:
            with self._span(step_type, *key):
                return self._network.wait_receive(message)
        except RuntimeError as error:
            error.add_note(f"while waiting for the {message}")
            raise

    @property
    def _network(self) -> Transport[Tensor]:
        if self._transport is None:
            raise RuntimeError("transport must be given for a schedule with messages")
        return self._transport

    def _span(
        self, step_type: MetaStepType, stage: int, microbatch: int
    ) -> AbstractContextManager[None]:
        if self._recorder is None:
            return nullcontext()
        return self._recorder.span(MetaStep(step_type, stage, microbatch))


@dataclass(frozen=True, slots=True)
class PipelineContext:
    """What a function registered for a type of step works with.

    Attributes:
        rank: Rank of the pipeline.
        schedule: What is run.
        stages: This rank's stages by index.
        batch: The microbatches: args, kwargs and targets.
        run: Runs one step the built-in way, receiving what it needs; from any thread, and from
            several at once for different microbatches.
    """

    rank: int
    schedule: Schedule
    stages: Mapping[int, PipelineStage]
    batch: Batch
    run: Callable[[MetaStep], None]


def _unregistered(step_type: MetaStepType, stage_index: int) -> RuntimeError:
    return RuntimeError(
        f"stage {stage_index}: a function must be registered for {step_type.name} "
        "(register_custom_function)"
    )
