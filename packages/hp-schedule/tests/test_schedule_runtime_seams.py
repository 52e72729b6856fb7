"""Where other packages plug in: transports, sharded parameters, split backwards, step handlers."""

import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_schedule import Message, MessageKind, MetaStep, MetaStepType, Schedule, add_send_recv, gpipe
from hp_schedule.runtime import (
    DeferringSplitter,
    PipelineContext,
    PipelineScheduleRuntime,
    PipelineStage,
    ScheduleInterleaved1F1B,
)
from hp_schedule.runtime.stage import Grads, WeightBackward

CPU = torch.device("cpu")


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def schedule_of(text: str, *, stages: int = 1, microbatches: int = 1) -> Schedule:
    return Schedule.from_steps(
        [[MetaStep.from_str(word) for word in text.split()]],
        stage_to_rank=[0] * stages,
        num_microbatches=microbatches,
    )


def runtime_of(
    schedule: Schedule, modules: dict[int, nn.Module], **options: Any
) -> PipelineScheduleRuntime:
    stages = [
        PipelineStage(
            module,
            stage_index=stage,
            num_stages=schedule.num_stages,
            device=CPU,
            splitter=options.get("splitter"),
        )
        for stage, module in modules.items()
    ]
    options.pop("splitter", None)
    rank = options.pop("pipeline_rank", 0)
    return PipelineScheduleRuntime(stages, schedule, pipeline_rank=rank, loss_fn=loss_fn, **options)


class InMemory:
    """A transport between threads of one process: one queue per directed edge."""

    def __init__(self, queues: dict[tuple[int, int], queue.Queue[Any]]) -> None:
        self.queues = queues
        self.buffers: dict[Message, tuple[Tensor, ...]] = {}
        self.sent: list[Message] = []

    def send(self, message: Message, value: tuple[Tensor, ...]) -> None:
        self.sent.append(message)
        self.queues[message.edge].put((message, value))

    def post_receive(self, message: Message, buffer: tuple[Tensor, ...]) -> None:
        self.buffers[message] = buffer

    def wait_receive(self, message: Message) -> tuple[Tensor, ...]:
        sent, value = self.queues[message.edge].get(timeout=10)
        assert sent == message
        buffer = self.buffers.pop(message)
        for target, source in zip(buffer, value, strict=True):
            target.copy_(source)
        return buffer

    def release_send(self, message: Message) -> None:
        assert message in self.sent

    def finish(self) -> None:
        """Nothing to wait for: queues take everything."""

    def abort(self, error: BaseException) -> BaseException:
        return error


def test_ranks_may_be_threads_with_a_transport_of_their_own() -> None:
    schedule = add_send_recv(gpipe(2, num_microbatches=3))
    queues: dict[tuple[int, int], queue.Queue[Any]] = {
        edge: queue.Queue() for edge in schedule.edges
    }
    transports = [InMemory(queues) for _ in range(2)]
    modules = [Doubled(), Doubled()]
    x = torch.arange(12.0).reshape(6, 2)

    def run(rank: int) -> list[Tensor]:
        runtime = runtime_of(
            schedule, {rank: modules[rank]}, pipeline_rank=rank, transport=transports[rank]
        )
        return [*runtime.run(x, target=x).losses, *runtime.run(x, target=x).losses]

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(run, range(2)))
    once = [loss_fn(modules[1](modules[0](part)), part) for part in x.chunk(3)]
    torch.testing.assert_close(found[1], [loss.detach() for loss in once] * 2)
    kinds = [message.kind for message in transports[1].sent]
    assert kinds == [MessageKind.REQUEST] + [MessageKind.OUTPUT_GRADIENT] * 6
    headers = [m for m in transports[0].sent if m.kind is MessageKind.HEADER]
    assert len(headers) == 6  # no input_spec was given


class Sharding:
    """Writes down what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @contextmanager
    def during_run(self) -> Iterator[None]:
        self.calls.append("start")
        yield
        self.calls.append("end")

    def unshard(self, stage: PipelineStage) -> None:
        self.calls.append(f"unshard {stage.stage_index}")

    def wait_unshard(self, stage: PipelineStage) -> None:
        self.calls.append(f"wait {stage.stage_index}")

    def reshard(self, stage: PipelineStage) -> None:
        self.calls.append(f"reshard {stage.stage_index}")

    def reduce_grad(self, stage: PipelineStage) -> None:
        self.calls.append(f"reduce {stage.stage_index}")


def test_sharded_parameters_are_waited_for_before_every_step_that_computes() -> None:
    schedule = schedule_of("0UNSHARD 0F0 0I0 0W0 0REDUCE_GRAD 0RESHARD")
    sharding = Sharding()
    runtime = runtime_of(schedule, {0: Doubled()}, sharding=sharding)
    x = torch.ones(1, 2)
    runtime.run(x, target=x)
    assert sharding.calls == [
        *("start", "unshard 0", "wait 0", "wait 0", "wait 0"),
        *("reduce 0", "reshard 0", "end"),
    ]
    sharding.calls.clear()
    runtime.evaluate(x, target=x)
    assert sharding.calls == ["start", "unshard 0", "wait 0", "reshard 0", "end"]


def test_a_named_schedule_gathers_and_reduces_where_parameters_are_sharded() -> None:
    sharding = Sharding()
    stages = [
        PipelineStage(Doubled(), stage_index=stage, num_stages=2, device=CPU) for stage in (0, 1)
    ]
    runtime = ScheduleInterleaved1F1B(
        stages, 2, loss_fn=loss_fn, sharding=sharding, max_active_stages=1
    )
    x = torch.ones(2, 2)
    runtime.run(x, target=x)
    calls = [call for call in sharding.calls if "wait" not in call]
    assert calls.count("reduce 0") == calls.count("reduce 1") == 1
    assert calls[:4] == ["start", "unshard 0", "reshard 0", "unshard 1"]


def test_without_sharding_its_steps_need_a_function() -> None:
    runtime = runtime_of(schedule_of("0UNSHARD 0F0 0B0 0RESHARD"), {0: Doubled()})
    x = torch.ones(1, 2)
    with pytest.raises(RuntimeError, match="must be registered for FSDP_UNSHARD"):
        runtime.run(x, target=x)


class Splitter(DeferringSplitter):
    """Counts the calls of the two parts."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def split_backward(
        self,
        module: nn.Module,
        outputs: Sequence[Tensor],
        grads: Sequence[Tensor],
        *,
        inputs: Sequence[Tensor],
    ) -> tuple[Grads, WeightBackward]:
        self.calls.append(f"input of {len(inputs)}")
        found, later = super().split_backward(module, outputs, grads, inputs=inputs)

        def weight() -> None:
            self.calls.append("weight")
            later()

        return found, weight


def test_a_stage_may_split_its_backward_in_its_own_way() -> None:
    splitter = Splitter()
    modules: dict[int, nn.Module] = {0: Doubled(), 1: Doubled()}
    schedule = schedule_of("0F0 1F0 1I0 0I0 0W0 1W0", stages=2)
    runtime_of(schedule, modules, splitter=splitter).run(torch.ones(1, 2), target=torch.ones(1, 2))
    assert splitter.calls == ["input of 1", "input of 0", "weight", "weight"]


OVERLAP = "0F0 1F0 1B0 (0B0;0F1)OVERLAP_B_F 1F1 1B1 0B1"


def test_an_overlap_is_one_span_whoever_runs_its_halves() -> None:
    seen: list[tuple[str, list[int]]] = []

    def together(step: MetaStep, context: PipelineContext) -> None:
        seen.append((str(step), sorted(context.losses)))
        for half in reversed(step.sub_steps):
            context.run(half)

    schedule = schedule_of(OVERLAP, stages=2, microbatches=2)
    runtime = runtime_of(schedule, {0: Doubled(), 1: Doubled()})
    x = torch.ones(2, 2)
    built_in = [str(span.step) for span in runtime.run(x, target=x).timeline]
    runtime.register_custom_function(MetaStepType.OVERLAP_B_F, together)
    registered = [str(span.step) for span in runtime.run(x, target=x).timeline]
    assert built_in == registered == OVERLAP.split()
    assert seen == [("(0B0;0F1)OVERLAP_B_F", [0])]
