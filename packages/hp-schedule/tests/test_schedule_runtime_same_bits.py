"""What used to differ from one process without a word: detached outputs, layouts, tied parameters.

One process is the modules one after the other, microbatches in ascending order; of parameters that
several stages have, each stage adds up a gradient of its own, and these are added by stage.
"""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hp_platform.testing import RankError, run_distributed
from hp_schedule import (
    Schedule,
    interleaved_1f1b,
    interleaved_zero_bubble,
    one_f_one_b,
    zbv,
)
from hp_schedule.runtime import PipelineStage, SharedParameterInfo, TensorSpec, from_schedule

CPU = torch.device("cpu")
WIDTH, NUM = 6, 3


class Sometimes(nn.Module):
    """Detaches one of its two outputs for one microbatch, which `x` names."""

    def __init__(self, way: str, microbatch: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.way, self.microbatch = way, microbatch

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(self.layer(x))
        if int(x[0, 0]) != self.microbatch:
            return y, y * 2
        if self.way == "no_grad":
            with torch.no_grad():
                return self.layer(x), self.layer(x)
        return (y, (y * 2).detach()) if self.way == "second" else (y.detach(), y.detach() * 2)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z: Tensor = self.layer(x + y)
        return z


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def run(
    schedule: Schedule,
    modules: Sequence[nn.Module],
    inputs: Sequence[Tensor],
    *,
    specs: Sequence[TensorSpec] | None = None,
    shared: Sequence[SharedParameterInfo] = (),
) -> tuple[list[Tensor], dict[int, list[Tensor | None]]]:
    """Run this rank's part once; return losses, and gradients by stage."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    stages = [
        PipelineStage(
            modules[index],
            stage_index=index,
            num_stages=len(modules),
            device=CPU,
            input_spec=specs if index else None,
        )
        for index in schedule.stages_of(rank)
    ]
    runtime = from_schedule(schedule, stages, loss_fn=loss_fn, shared_parameters=shared)
    losses = runtime.run_microbatches([(x,) for x in inputs], None, [torch.ones(())] * NUM).losses
    grads = {s.stage_index: [p.grad for p in s.module.parameters()] for s in stages}
    return losses, grads


def numbered() -> list[Tensor]:
    return [torch.full((2, WIDTH), float(number)) for number in range(NUM)]


def detaching(way: str, microbatch: int, spec: TensorSpec | None) -> bool:
    """Run two stages; whether it came to its end."""
    specs = None if spec is None else (TensorSpec((2, WIDTH)), spec)
    schedule = one_f_one_b(2, num_microbatches=NUM)
    run(schedule, [Sometimes(way, microbatch), Both()], numbered(), specs=specs)
    return True


@pytest.mark.parametrize("way", ["all", "second", "no_grad"])
@pytest.mark.parametrize("microbatch", [0, 2])
def test_an_output_that_is_detached_for_one_microbatch_is_refused(
    way: str, microbatch: int
) -> None:
    modules = [Sometimes(way, microbatch), Both()]
    index = 1 if way == "second" else 0
    message = f"output {index} of stage 0, microbatch {microbatch} must require grad"
    schedule = interleaved_1f1b(1, num_microbatches=NUM, num_stages_per_rank=2)
    with pytest.raises(ValueError, match=message):
        run(schedule, modules, numbered())


@pytest.mark.parametrize("spec", [None, TensorSpec((2, WIDTH))])
def test_an_output_detached_for_another_rank_is_refused_by_the_rank_that_has_it(
    spec: TensorSpec | None,
) -> None:
    with pytest.raises(RankError, match="output 1 of stage 0, microbatch 2 must require grad"):
        run_distributed(detaching, "second", 2, spec, world_size=2)


def test_an_output_may_be_detached_where_the_next_stage_says_so() -> None:
    spec = TensorSpec((2, WIDTH), requires_grad=False)
    assert run_distributed(detaching, "second", 2, spec, world_size=2) == [True] * 2


class Turned(nn.Module):
    """Passes on a view of what it has computed, which lies otherwise in memory."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 3 * 64 if way == "chunk" else 64)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.layer(x))
        return {
            "transpose": lambda: y.transpose(1, 2),
            "chunk": lambda: y.chunk(3, -1)[1],
            "expand": lambda: y.mean(1, keepdim=True).expand(-1, 64, -1),
        }[self.way]()


WAYS = ("transpose", "chunk", "expand")


def turned(way: str) -> tuple[list[nn.Module], list[Tensor]]:
    torch.manual_seed(3)
    modules: list[nn.Module] = [Turned(way), nn.Linear(64, 9)]
    return modules, [torch.randn(1, 64, 64) for _ in range(NUM)]


def of_one_process(modules: Sequence[nn.Module], inputs: Sequence[Tensor]) -> list[Tensor]:
    losses = []
    for x in inputs:
        for module in modules:
            x = module(x)  # noqa: PLW2901
        loss = loss_fn(x, torch.ones(()))
        torch.autograd.backward(loss)
        losses.append(loss.detach())
    return losses


def layouts() -> list[bool]:
    """Say for each case whether this rank has the bits of one process, which runs here too."""
    found = []
    for way in WAYS:
        strides = TensorSpec((1, 64, 64), strides=(64 * 64, 1, 64))
        for specs in (None, (strides,)) if way == "transpose" else (None,):
            modules, inputs = turned(way)
            schedule = one_f_one_b(2, num_microbatches=NUM)
            losses, grads = run(schedule, modules, inputs, specs=specs)
            own, _ = turned(way)
            expected = of_one_process(own, inputs)
            wanted: list[Tensor | None] = [p.grad for p in own[dist.get_rank()].parameters()]
            has = [*losses, *grads[dist.get_rank()]]
            wanted = [*expected[: len(losses)], *wanted]
            same = [
                a is not None and b is not None and torch.equal(a, b)
                for a, b in zip(has, wanted, strict=True)
            ]
            found.append(all(same))
    return found


def test_a_stage_gets_what_lies_in_memory_as_in_one_process_and_gives_its_bits() -> None:
    for rank in run_distributed(layouts, world_size=2):
        assert rank == [True] * 4


def otherwise(way: str, world_size: int) -> None:
    modules, inputs = turned(way)
    schedule = one_f_one_b(world_size, num_microbatches=NUM)
    if world_size == 1:
        schedule = interleaved_1f1b(1, num_microbatches=NUM, num_stages_per_rank=2)
    run(schedule, modules, inputs, specs=[TensorSpec((1, 64, 64))])


SAYS = r"strides and offset .* of stage 0, microbatch 0 must be those of input_spec .*"


@pytest.mark.parametrize("way", WAYS)
def test_an_output_that_does_not_lie_as_the_input_spec_says_is_refused(way: str) -> None:
    with pytest.raises(ValueError, match=SAYS):
        otherwise(way, 1)


def test_so_it_is_between_ranks() -> None:
    with pytest.raises(RankError, match=SAYS):
        run_distributed(otherwise, "transpose", 2, world_size=2)


class Tied(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.own = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(x @ self.table) @ self.own
        return y


TIED = [0, 1, 3]


def tied() -> list[Tensor]:
    """Return the gradients of the shared table, on this rank and of one process."""
    torch.manual_seed(5)
    inputs = [torch.randn(4, WIDTH) for _ in range(NUM)]
    found = []
    for schedule in (
        interleaved_1f1b(2, num_microbatches=NUM, num_stages_per_rank=2),
        interleaved_zero_bubble(2, num_microbatches=NUM, num_stages_per_rank=2),
        zbv(2, num_microbatches=NUM),
    ):
        infos = [SharedParameterInfo(dict.fromkeys(TIED, "table"))]
        modules = [Tied(seed) for seed in range(4)]
        run(schedule, modules, inputs, shared=infos)
        mine = [index for index in TIED if schedule.stage_to_rank[index] == dist.get_rank()]
        grads = [modules[index].get_parameter("table").grad for index in mine]
        found += [grad for grad in grads if grad is not None]
    alone = [Tied(seed) for seed in range(4)]
    for index in TIED:
        alone[index].table.data.copy_(alone[0].table.data)
    of_one_process(alone, inputs)
    total = torch.zeros(WIDTH, WIDTH)
    for index in TIED:
        grad = alone[index].table.grad
        assert grad is not None
        total += grad
    assert found
    return [total, *found]


def test_a_tied_parameter_gets_its_stages_gradients_added_in_their_order() -> None:
    for expected, *found in run_distributed(tied, world_size=2):
        for grad in found:
            torch.testing.assert_close(grad, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_one_parameter_in_one_graph_gives_the_same_gradients_to_rounding(
    dtype: torch.dtype,
) -> None:
    """Also on one rank: of autograd, which adds both parts of every microbatch first."""
    torch.manual_seed(5)
    inputs = [torch.randn(4, WIDTH, dtype=dtype) for _ in range(NUM)]
    schedule = interleaved_1f1b(1, num_microbatches=NUM, num_stages_per_rank=4)
    modules = [Tied(seed).to(dtype) for seed in range(4)]
    run(schedule, modules, inputs, shared=[SharedParameterInfo(dict.fromkeys(TIED, "table"))])
    alone = [Tied(seed).to(dtype) for seed in range(4)]
    for index in TIED:
        alone[index].table = alone[0].table
    of_one_process(alone, inputs)
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    for mine, other in zip(modules, alone, strict=True):
        torch.testing.assert_close(mine.table.grad, other.table.grad, rtol=bound, atol=bound)
