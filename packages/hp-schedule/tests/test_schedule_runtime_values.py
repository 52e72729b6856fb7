"""What travels between stages: several tensors, of any shape, with gradients or without.

All cases run in one group of two ranks and are compared with one process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hp_platform import linear, submit_weight_grad
from hp_platform.testing import run_distributed
from hp_schedule import MetaStep, Schedule, interleaved_1f1b, one_f_one_b
from hp_schedule.runtime import PipelineStage, TensorSpec, from_schedule

WIDTH, ROWS = 4, 3


class Block(nn.Module):
    """A residual layer whose weight gradient can be put off, and a scale whose cannot."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator).double())
        self.scale = nn.Parameter(torch.rand(WIDTH, generator=generator).double())

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        return x + torch.tanh(linear(x, self.weight)) * self.scale + shift


class Branches(nn.Module):
    """Passes on a value, a mask, a table without gradient and the first stage's input."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.block = Block(seed)

    def forward(
        self, x: Tensor, keep: Tensor, table: Tensor, skip: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y = torch.where(keep[:, None], self.block(x), x) + table[: len(x)]
        return y, keep.roll(1), table + 1, skip


class Start(nn.Module):
    """Makes what `Branches` pass on."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.block = Block(seed)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y = self.block(x)
        table = torch.arange(len(x) * WIDTH).reshape(len(x), WIDTH).double()
        return y, x[:, 0] > 0, table, y * 2


class End(nn.Module):
    """Uses of what `Branches` pass on the value alone, or the skipped value too."""

    def __init__(self, seed: int, *, uses_skip: bool) -> None:
        super().__init__()
        self.block = Block(seed)
        self.uses_skip = uses_skip

    def forward(self, x: Tensor, keep: Tensor, table: Tensor, skip: Tensor) -> Tensor:
        y = torch.where(keep[:, None], self.block(x), table)
        return y * skip if self.uses_skip else y


class Recomputed(nn.Module):
    """A block under activation checkpointing."""

    def __init__(self, seed: int, *, reentrant: bool) -> None:
        super().__init__()
        self.block = Block(seed)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return y


class _Square(torch.autograd.Function):
    """x * x * w in one operation, with a weight gradient that can be put off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.weight = w
        return x * x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, w = ctx.saved_tensors
        squared, held = x.detach() * x.detach(), grad.detach()
        return 2 * x * w * grad, submit_weight_grad(ctx.weight, lambda: (squared * held).sum(0))


class Fused(nn.Module):
    """A fused autograd Function of its own between two layers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.block = Block(seed)
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Square.apply(self.block(x), self.gain)  # type: ignore[no-untyped-call]
        return y


class Compiled(nn.Module):
    """A block that is compiled."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.block = Block(seed)
        self.fast = torch.compile(self.block, backend="aot_eager", dynamic=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fast(x)
        return y


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def split(num_ranks: int, num_microbatches: int, *, num_stages_per_rank: int = 1) -> Schedule:
    """Return 1F1B with every backward in two steps, the second as late as the next but one."""
    schedule = interleaved_1f1b(
        num_ranks, num_microbatches=num_microbatches, num_stages_per_rank=num_stages_per_rank
    )
    rows: list[list[MetaStep]] = []
    for row in schedule.steps:
        steps: list[MetaStep] = []
        late: list[MetaStep] = []
        for step in filter(None, row):
            halves = [MetaStep.from_str(str(step).replace("B", half)) for half in "IW"]
            is_backward = "B" in str(step)
            steps.append(halves[0] if is_backward else step)
            late += halves[1:] if is_backward else []
            if len(late) > 1:
                steps.append(late.pop(0))
        rows.append([*steps, *late])
    return Schedule.from_steps(
        rows, stage_to_rank=schedule.stage_to_rank, num_microbatches=num_microbatches
    )


def folded(num_microbatches: int) -> Schedule:
    """GPipe over four stages on two ranks: stages 1 and 2 are neighbours on rank 1."""
    rows = [
        [
            MetaStep.from_str(f"{stage}{kind}{microbatch}")
            for kind, stage in (("F", first), ("F", second), ("B", second), ("B", first))
            for microbatch in range(num_microbatches)
        ]
        for first, second in ((0, 3), (1, 2))
    ]
    return Schedule.from_steps(rows, stage_to_rank=[0, 1, 1, 0], num_microbatches=num_microbatches)


def same_length(num: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(ROWS, WIDTH, generator=generator).double() for _ in range(num)]


def other_lengths(num: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(2 + 3 * m % 4, WIDTH, generator=generator).double() for m in range(num)]


@dataclass(frozen=True)
class Case:
    """One pipeline of two ranks, and what goes in.

    Attributes:
        modules: By stage, anew for every rank.
        inputs: Of the microbatches.
        specs: Whether stages say what they expect.
        exact: Whether microbatches accumulate in ascending order, so that bits are the same.
    """

    schedule: Schedule
    modules: Callable[[], Sequence[nn.Module]]
    inputs: Callable[[int], list[Tensor]] = same_length
    specs: TensorSpec | Sequence[TensorSpec] | None = None
    exact: bool = True
    options: dict[str, Any] = field(default_factory=dict)


def blocks(num: int, kind: Callable[[int], nn.Module] = Block) -> list[nn.Module]:
    return [kind(stage) for stage in range(num)]


def half_recomputed() -> list[nn.Module]:
    # A reentrant checkpoint needs an input that requires grad, which a first stage has not.
    return [Block(0), Recomputed(1, reentrant=True)]


def branches(*, uses_skip: bool) -> list[nn.Module]:
    return [Start(0), Branches(1), Branches(2), End(3, uses_skip=uses_skip)]


SPEC = TensorSpec((ROWS, WIDTH), torch.float64)
FOUR_SPECS = (
    SPEC,
    TensorSpec((ROWS,), torch.bool),
    TensorSpec((ROWS, WIDTH), torch.float64, requires_grad=False),
    SPEC,
)
SEVERAL = Case(
    interleaved_1f1b(2, num_microbatches=3), partial(branches, uses_skip=True), specs=FOUR_SPECS
)
CASES = {
    "one tensor, shapes known": Case(split(2, 4), partial(blocks, 2), specs=SPEC),
    "one tensor, shapes told": Case(split(2, 4), partial(blocks, 2)),
    "sends waited for": Case(
        split(2, 5), partial(blocks, 2), specs=SPEC, options={"overlap_p2p": False}
    ),
    "other lengths": Case(split(2, 5), partial(blocks, 2), other_lengths),
    "other lengths, interleaved": Case(
        interleaved_1f1b(2, num_microbatches=5), partial(blocks, 4), other_lengths
    ),
    "other lengths, folded": Case(folded(3), partial(blocks, 4), other_lengths),
    "more in flight than sends are kept": Case(
        folded(12), partial(blocks, 4), other_lengths, options={"overlap_p2p": False}
    ),
    "several tensors, shapes known": SEVERAL,
    "several tensors, shapes told": replace(SEVERAL, specs=None, inputs=other_lengths),
    "several tensors, folded": replace(SEVERAL, schedule=folded(3), specs=None),
    "several tensors, split": replace(SEVERAL, schedule=split(2, 3, num_stages_per_rank=2)),
    "a gradient that nothing reaches": replace(
        SEVERAL, modules=partial(branches, uses_skip=False), exact=False
    ),
    "recomputed, reentrant": Case(split(2, 3), half_recomputed, specs=SPEC),
    "recomputed": Case(
        split(2, 3), partial(blocks, 2, partial(Recomputed, reentrant=False)), specs=SPEC
    ),
    "fused": Case(split(2, 3), partial(blocks, 2, Fused), specs=SPEC),
    "compiled": Case(split(2, 3), partial(blocks, 2, Compiled), specs=SPEC, exact=False),
}


@dataclass(frozen=True)
class Outcome:
    losses: list[Tensor]
    grads: dict[str, Tensor]


def gradients(modules: dict[int, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{stage}.{name}": parameter.grad
        for stage, module in modules.items()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def run_case(case: Case) -> Outcome:
    schedule = case.schedule
    all_modules = case.modules()
    modules = {stage: all_modules[stage] for stage in schedule.stages_of(dist.get_rank())}
    stages = [
        PipelineStage(
            module,
            stage_index=stage,
            num_stages=schedule.num_stages,
            device=torch.device("cpu"),
            input_spec=case.specs if stage else None,
        )
        for stage, module in modules.items()
    ]
    runtime = from_schedule(schedule, stages, loss_fn=loss_fn, **case.options)
    inputs = case.inputs(schedule.num_microbatches)
    result = runtime.run_microbatches([(x,) for x in inputs], None, [x + 1 for x in inputs])
    return Outcome(result.losses, gradients(modules))


def run_cases() -> dict[str, Outcome]:
    return {name: run_case(case) for name, case in CASES.items()}


@cache
def outcomes() -> list[dict[str, Outcome]]:
    return run_distributed(run_cases, world_size=2, timeout=90)


def one_process(case: Case) -> Outcome:
    modules = dict(enumerate(case.modules()))
    losses = []
    for x in case.inputs(case.schedule.num_microbatches):
        output: Any = (x,)
        for module in modules.values():
            call = module.block if isinstance(module, Compiled) else module
            output = call(*output) if isinstance(output, tuple) else call(output)
        loss = loss_fn(output, x + 1)
        torch.autograd.backward(loss)
        losses.append(loss.detach())
    return Outcome(losses, gradients(modules))


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_process(name: str) -> None:
    case = CASES[name]
    expected = one_process(case)
    found = [outcome[name] for outcome in outcomes()]
    last = found[case.schedule.stage_to_rank[-1]]
    tolerance = 0.0 if case.exact else 1e-12
    torch.testing.assert_close(last.losses, expected.losses, rtol=tolerance, atol=tolerance)
    grads = {key: value for outcome in found for key, value in outcome.grads.items()}
    torch.testing.assert_close(grads, expected.grads, rtol=tolerance, atol=tolerance)


def test_one_f_one_b_is_what_split_is_made_of() -> None:
    whole = one_f_one_b(2, num_microbatches=3)
    assert [len(row) for row in split(2, 3).steps] == [len(row) + 3 for row in whole.steps]
