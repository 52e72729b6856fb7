"""Schedules of torch.distributed.pipelining beside one process: stages, microbatches, losses."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from integration_tests.jobs.search.cases import Case, Errors
from integration_tests.jobs.search.tensors import error_of, normal

WIDTH = 6
SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "LoopedBFS": 2,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
"""Schedule -> stages of a rank."""
_FOLDED = ("ZBVZeroBubble", "DualPipeV")
"""Schedules of which rank 0 has the first and the last stage."""


class _Stage(nn.Module):
    """A stage, whose parameters are drawn by its index.

    Args:
        index: Index of the stage.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(100 + index)
        self.index = index
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what the next stage is given."""
        out: Tensor = self.second(torch.tanh(self.first(inputs)))
        return out


class _Residual(_Stage):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + super().forward(self.norm(inputs))


class _Twice(_Stage):
    """A layer that is called twice."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(torch.sin(super().forward(inputs)))


class _Biases(nn.Module):
    """A matrix that two products share, whose biases are their own and come before it."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(100 + index)
        self.one = nn.Parameter(torch.randn(WIDTH))
        self.two = nn.Parameter(torch.randn(WIDTH))
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(inputs, self.matrix, self.one)), self.matrix, self.two)


class _MatrixFirst(_Biases):
    """The same, with the matrix before the biases."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        one, two = self.one, self.two
        del self.one, self.two
        self.one, self.two = one, two


class _Frozen(_Stage):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.first.requires_grad_(False)


class _AllFrozen(_Stage):
    """A first stage of which nothing is trained."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.requires_grad_(index != 0)


class _Unused(_Stage):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.unused = nn.Parameter(torch.ones(3))


class _Pair(nn.Module):
    """Two tensors from stage to stage, of which the second is passed on with a change."""

    last = 1

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.body = index, _Stage(index)

    def forward(
        self, inputs: Tensor, other: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | Tensor:
        other = inputs * 0.5 if other is None else other
        out: Tensor = self.body(inputs) + other
        return out if self.index == self.last else (out, torch.cos(other) * inputs.mean())


class _Positions(nn.Module):
    """Beside the activations whole numbers, which have no gradient."""

    last = 1

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.body = index, _Stage(index)

    def forward(
        self, inputs: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | Tensor:
        if positions is None:
            positions = torch.arange(inputs.shape[0]) % 3
        out: Tensor = self.body(inputs) * (1 + positions[:, None])
        return out if self.index == self.last else (out, positions + 1)


class _Batched(_Stage):
    """A batch norm, with statistics of its own."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(self.norm(inputs))


class _Counting(_Stage):
    """A buffer that counts calls, as routers count their tokens."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls += 1
        return super().forward(inputs)

    calls: Tensor


class _Packed(_Stage):
    """Queries, keys and values of one product, which are split."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.packed = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        queries, keys, values = self.packed(inputs).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(queries[None], keys[None], values[None])[0]
        return inputs + super().forward(mixed)


class _Checkpointed(_Stage):
    def forward(self, inputs: Tensor) -> Tensor:
        out = checkpoint(super().forward, inputs, use_reentrant=False)
        assert isinstance(out, Tensor)
        return out


class _Prompt(_Stage):
    """Parameters that meet the inputs only after layers of their own."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.prompt = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * torch.tanh(self.first(self.prompt)) + self.prompt


class _Gated(_Stage):
    """Parameters whose products are multiplied with each other."""

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = F.silu(self.first(inputs)) * self.second(inputs)
        return out


class _Tied(_Stage):
    """A matrix that is used as it is and transposed."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) @ self.first.weight


class _View(_Stage):
    """An output that is a view."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).t().contiguous().t()


class _InPlace(_Stage):
    """An output that is changed in place."""

    def forward(self, inputs: Tensor) -> Tensor:
        out = super().forward(inputs)
        return out.mul_(2).relu_().add_(inputs)


class _Through(_Stage):
    """A last stage or one between that gives its inputs as they are, beside another path."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs if self.index % 2 else super().forward(inputs)


class _Penalised(_Stage):
    """A gradient that is changed on its way, as auxiliary losses of routers do."""

    def forward(self, inputs: Tensor) -> Tensor:
        out = super().forward(inputs)
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient * 1.5)
        return out


class _Hooked(_Stage):
    """A hook of a parameter's gradient."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.first.weight.register_hook(lambda gradient: gradient * 2)

    def __deepcopy__(self, memo: dict[int, object]) -> "_Hooked":
        return _Hooked(self.index).double()


KINDS: dict[str, Callable[[int], nn.Module]] = {
    "plain": _Stage,
    "residual": _Residual,
    "twice": _Twice,
    "biases": _Biases,
    "matrix-first": _MatrixFirst,
    "frozen": _Frozen,
    "all-frozen": _AllFrozen,
    "unused": _Unused,
    "pair": _Pair,
    "positions": _Positions,
    "batch-norm": _Batched,
    "counting": _Counting,
    "packed": _Packed,
    "checkpointed": _Checkpointed,
    "prompt": _Prompt,
    "gated": _Gated,
    "tied": _Tied,
    "view": _View,
    "in-place": _InPlace,
    "through": _Through,
    "penalised": _Penalised,
    "hooked": _Hooked,
}
HOWS = (
    "sum",
    "accumulated",
    "accumulated-scaled",
    "evaluated-first",
    "evaluated-between",
    "evaluated-after",
    "no-outputs",
    "static",
    "uneven",
    "input-gradient",
    "updated",
    "sharded",
    "sharded-accumulated",
    "sharded-evaluated-between",
)
"""What else is asked of a run."""
_UNSCALED = ("sum", "accumulated", "evaluated-between", *HOWS[-2:])
_TWO_STEPS = ("updated", "accumulated-scaled", *_UNSCALED[1:])


def cases() -> Iterator[Case]:
    """Return schedules with kinds of stages, and with what else is asked."""
    for schedule in SCHEDULES:
        for kind in KINDS:
            for microbatches in (4, 6):
                work = partial(_compared, schedule, kind, microbatches, "")
                yield Case(f"{schedule} {kind}, {microbatches} microbatches", work)
        for how in HOWS:
            ranks = 4 if how.startswith("sharded") else 2
            for kind in ("plain", "batch-norm" if how.startswith("eval") else "residual"):
                work = partial(_compared, schedule, kind, 4, how)
                yield Case(f"{schedule} {kind}, {how}", work, ranks=ranks)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def _sum(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target, reduction="sum")


class _Run:
    """A schedule beside one process.

    Args:
        schedule: Name of the schedule.
        kind: Kind of the stages.
        microbatches: Microbatches of a step.
        how: What else is asked.
    """

    def __init__(self, schedule: str, kind: str, microbatches: int, how: str) -> None:
        torch.set_default_dtype(torch.float64)
        self.microbatches, self.how = microbatches, how
        self.count = 2 * SCHEDULES[schedule]
        self.stages = [KINDS[kind](index) for index in range(self.count)]
        for stage in self.stages:
            if isinstance(stage, _Pair | _Positions):
                stage.last = self.count - 1
        self.model = [copy.deepcopy(stage) for stage in self.stages]
        sizes = (dist.get_world_size() // 2, 2)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "pipe"))
        rank = mesh.get_local_rank("pipe")
        self.parts, self.part = mesh.size(0), mesh.get_local_rank("data")
        folded = [rank, self.count - 1 - rank] if self.count > 2 else [rank]
        self.indices = folded if schedule in _FOLDED else [*range(rank, self.count, 2)]
        self.is_scaled = how not in _UNSCALED
        self.loss_of = _sum if how == "sum" else _loss
        if how.startswith("sharded"):
            for index in self.indices:
                fully_shard(self.stages[index], mesh=mesh["data"])
        example = normal(2, WIDTH, seed=9)
        static: dict[str, Any] = (
            {"input_args": (example,), "output_args": (example,)} if how == "static" else {}
        )
        device, group = torch.device("cpu"), mesh.get_group("pipe")
        made = [
            PipelineStage(self.stages[i], i, self.count, device, group=group, **static)
            for i in self.indices
        ]
        kind_of = get_schedule_class(schedule)
        self.schedule = kind_of(
            made if issubclass(kind_of, PipelineScheduleMulti) else made[0],
            n_microbatches=microbatches,
            loss_fn=self.loss_of,
            scale_grads=self.is_scaled,
        )
        self.errors: dict[str, float] = {}

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Return inputs and targets of each step, of all data-parallel ranks."""
        rows = 2 * self.microbatches * self.parts + (1 if self.how == "uneven" else 0)
        seeds = (1, 2) if self.how in _TWO_STEPS else (1,)
        some = [(normal(rows, WIDTH, seed=s), normal(rows, WIDTH, seed=s + 50)) for s in seeds]
        if self.how == "input-gradient":
            some[0][0].requires_grad_()
        return some

    def _mine(self, inputs: Tensor, targets: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return what this rank gives to the schedule: inputs, targets, neither or both."""
        if self.parts > 1:
            inputs, targets = (t.tensor_split(self.parts)[self.part] for t in (inputs, targets))
        first, last = 0 in self.indices, self.count - 1 in self.indices
        return [inputs] if first else [], {"target": targets} if last else {}

    def evaluate(self, inputs: Tensor, targets: Tensor) -> None:
        """Call the stages without a backward, in both."""
        given, named = self._mine(inputs, targets)
        self.schedule.eval(*given, **named)
        piece = inputs.tensor_split(self.parts)[self.part]
        _call(self.model, piece.tensor_split(self.microbatches), None)

    def step(self, number: int, inputs: Tensor, targets: Tensor) -> None:
        """Take a step in both, and compare outputs and losses."""
        given, named = self._mine(inputs, targets)
        losses: list[Tensor] = []
        returned = self.how != "no-outputs"
        output = self.schedule.step(*given, losses=losses, return_outputs=returned, **named)
        told = []
        scale = self.parts * (self.microbatches if self.is_scaled else 1)
        for part in range(self.parts):
            halves = [each.tensor_split(self.parts)[part] for each in (inputs, targets)]
            pieces = [each.tensor_split(self.microbatches) for each in halves]
            told.append(_call(self.model, pieces[0], pieces[1], self.loss_of, scale))
        if named:
            if returned:
                self.errors[f"output {number}"] = error_of(output, told[self.part][0])
            for i, pair in enumerate(zip(losses, told[self.part][1], strict=True)):
                self.errors[f"loss {number}.{i}"] = error_of(*pair)

    def compare(self) -> Errors:
        """Compare gradients, weights and buffers of this rank's stages."""
        for index in self.indices:
            stage, model = self.stages[index], self.model[index]
            theirs = dict(model.named_parameters())
            for name, mine in stage.named_parameters():
                self.errors[f"gradient {index}.{name}"] = error_of(mine.grad, theirs[name].grad)
                self.errors[f"weight {index}.{name}"] = error_of(mine, theirs[name])
            kept = dict(model.named_buffers())
            for name, buffer in stage.named_buffers():
                self.errors[f"buffer {index}.{name}"] = error_of(buffer, kept[name])
        return self.errors


def _compared(schedule: str, kind: str, microbatches: int, how: str) -> Errors:
    """Train with a schedule and in one process, and compare gradients, outputs, losses, buffers."""
    run = _Run(schedule, kind, microbatches, how)
    for number, batch in enumerate(run.batches()):
        if how == "evaluated-first" or (how.endswith("evaluated-between") and number):
            run.evaluate(*batch)
        run.step(number, *batch)
        if how == "evaluated-after":
            run.evaluate(*batch)
        if how == "updated":
            _update([*run.stages, *run.model])
    return run.compare()


def _update(stages: list[nn.Module]) -> None:
    """Update weights, and forget gradients."""
    with torch.no_grad():
        for stage in stages:
            for parameter in stage.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.1)
                    parameter.grad = None


def _call(
    model: list[nn.Module],
    inputs: tuple[Tensor, ...],
    targets: tuple[Tensor, ...] | None,
    loss_of: Callable[[Tensor, Tensor], Tensor] = _loss,
    scale: int = 1,
) -> tuple[Tensor, list[Tensor]]:
    """Call all stages one after the other, microbatch by microbatch; with targets also backward."""
    outputs, losses = [], []
    for number, piece in enumerate(inputs):
        with torch.set_grad_enabled(targets is not None):
            values: tuple[Tensor, ...] = (piece,)
            for stage in model:
                found = stage(*values)
                values = found if isinstance(found, tuple) else (found,)
            outputs.append(values[0].detach())
        if targets is not None:
            loss = loss_of(values[0], targets[number])
            (loss / scale).backward()
            losses.append(loss.detach())
    return torch.cat(outputs), losses
