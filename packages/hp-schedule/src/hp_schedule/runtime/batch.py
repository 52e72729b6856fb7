"""Batches cut into microbatches, the state and the recorded times of a run, and its results.

Recorded times are seconds since the epoch, by this machine's clock at the end of the
run and a monotonic one before it; spans of ranks on one machine fit to well below a millisecond, of
ranks on several machines as well as their clocks are synchronised. On CUDA the times are those of
the device: events mark the steps, so that recording never holds up the host; reading the timeline
does.
"""

import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hp_schedule.runtime.specs import Specs
from hp_schedule.runtime.stage import PipelineStage
from hp_schedule.schedule import Schedule
from hp_schedule.steps import MetaStep
from hp_schedule.timeline import Span, Timeline

Mark: TypeAlias = float | torch.cuda.Event
"""A moment: seconds of the monotonic clock on a host, an event on CUDA."""

_READINGS = 5
"""How often the two clocks are compared; the earliest result was disturbed the least."""


class Recorder:
    """Collects the spans of one rank's run.

    Attributes:
        mark: Function that returns the moment at which the device gets here.

    Args:
        rank: Rank in the pipeline.
        device: Device of the stages.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._spans: list[tuple[MetaStep, Mark, Mark]] = []
        self.mark: Callable[[], Mark] = _event if device.type == "cuda" else time.perf_counter
        self._origin = self.mark()

    def add(self, step: MetaStep, start: Mark) -> None:
        """Record a span of a step that ends now.

        Args:
            step: The step.
            start: Return value of `mark` when the step began.
        """
        self._spans.append((step, start, self.mark()))

    def timeline(self) -> Timeline:
        """Return the spans so far; on CUDA wait until the device has got there."""
        if not self._spans:
            return Timeline()
        nows, walls = self._read_clocks()
        marks = [mark for _, *both in self._spans for mark in both]
        seconds = _seconds_since(self._origin, [*nows, *marks])
        # The origin by the wall clock: too late by however long this thread is kept waiting
        # between two readings.
        epoch = min(map(operator.sub, walls, seconds))
        times = iter(seconds[_READINGS:])
        return Timeline(
            [
                Span(self._rank, step, epoch + start, epoch + end)
                for (step, *_), start, end in zip(self._spans, times, times, strict=True)
            ]
        )

    def _read_clocks(self) -> tuple[list[Mark], list[float]]:
        """Read both clocks several times: marks, and seconds since the epoch."""
        nows, walls = list[Mark](), list[float]()
        for _ in range(_READINGS):
            nows.append(now := self.mark())
            if isinstance(now, torch.cuda.Event):
                now.synchronize()
            walls.append(time.time())
        return nows, walls


def _seconds_since(origin: Mark, marks: Sequence[Mark]) -> list[float]:
    """Return the seconds from a mark to others, which the device has passed."""
    if isinstance(origin, torch.cuda.Event):
        events = [mark for mark in marks if isinstance(mark, torch.cuda.Event)]
        return [float(origin.elapsed_time(event)) / 1e3 for event in events]
    return [mark - origin for mark in marks if not isinstance(mark, torch.cuda.Event)]


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


BatchDims = Sequence[int | None]
"""For each positional argument the dim to cut along; None hands it to every microbatch whole."""


def split_args(
    args: Sequence[object], num: int, *, dims: BatchDims | None = None
) -> list[list[Any]]:
    """Cut positional arguments into microbatches.

    Tensors are cut as even as can be, the longer parts first; inside lists, tuples and dicts as
    well. What is no tensor goes to every microbatch as it is.

    Args:
        args: Positional arguments of the whole batch.
        num: Number of microbatches.
        dims: Default: 0 for every argument.

    Returns:
        The arguments of each microbatch.

    Raises:
        ValueError: If there is not one dim per argument, or a tensor is shorter than num.
    """
    if dims is None:
        dims = [0] * len(args)
    if len(dims) != len(args):
        raise ValueError(f"len(args_batch_dim) ({len(dims)}) must equal len(args) ({len(args)})")
    columns = [
        _split(arg, num, dim, name=f"argument {index}")
        for index, (arg, dim) in enumerate(zip(args, dims, strict=True))
    ]
    return [[column[index] for column in columns] for index in range(num)]


def split_kwargs(
    kwargs: Mapping[str, object], num: int, *, dims: Mapping[str, int | None] | None = None
) -> list[dict[str, Any]]:
    """Cut keyword arguments into microbatches, as `split_args` does; dims not named are 0.

    Raises:
        ValueError: If a tensor is shorter than num or lacks the dim.
    """
    dims = {} if dims is None else dims
    columns = {
        name: _split(value, num, dims.get(name, 0), name=f"argument {name}")
        for name, value in kwargs.items()
    }
    return [{name: column[index] for name, column in columns.items()} for index in range(num)]


def concat_outputs(outputs: Sequence[Any], *, dim: int = 0) -> Any:
    """Put the outputs of microbatches together; the inverse of the cut.

    Args:
        outputs: Output of each microbatch: a tensor, or a sequence or dict of such.
        dim: Dimension along which tensors are concatenated; scalars become a vector.

    Returns:
        In the structure of one microbatch's output; None without outputs.
    """
    if not outputs:
        return None
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(list(outputs), dim) if first.dim() else torch.stack(list(outputs))
    if isinstance(first, (tuple, list)):
        return tuple(concat_outputs(parts, dim=dim) for parts in zip(*outputs, strict=True))
    if isinstance(first, Mapping):
        return {name: concat_outputs([part[name] for part in outputs], dim=dim) for name in first}
    return list(outputs)


class PipelineResult:
    """Result of a run on one rank.

    Args:
        losses: See the attribute.
        outputs: See the attribute.
        timeline: Returns the spans.
        concat_dim: Dimension along which outputs are put together.

    Attributes:
        losses: One detached scalar per microbatch on the rank of the last stage, not scaled; empty
            elsewhere, and without both loss function and backwards.
        outputs: Outputs of the last stage for each microbatch, detached; empty elsewhere, and in
            training unless asked for.
    """

    def __init__(
        self,
        losses: Sequence[Tensor],
        outputs: Sequence[Any],
        *,
        timeline: Callable[[], Timeline],
        concat_dim: int = 0,
    ) -> None:
        self.losses = list(losses)
        self.outputs = list(outputs)
        self._timeline = timeline
        self._concat_dim = concat_dim

    @property
    def output(self) -> Any:
        """Return the outputs of all microbatches in one; None where there are none."""
        return concat_outputs(self.outputs, dim=self._concat_dim)

    @property
    def timeline(self) -> Timeline:
        """Return this rank's spans, in seconds since the epoch; empty if nothing was recorded.

        On CUDA the first look waits until the device has got to the end of the run.
        """
        return self._timeline()


def _split(value: object, num: int, dim: int | None, *, name: str) -> Sequence[object]:
    if dim is None or value is None:
        return [value] * num
    if isinstance(value, Tensor):
        if not -value.dim() <= dim < value.dim():
            raise ValueError(f"batch dim ({dim}) of {name} must be a dim of {list(value.shape)}")
        if value.shape[dim] < num:
            raise ValueError(
                f"size ({value.shape[dim]}) of {name} along dim {dim} must be >= the number of "
                f"microbatches ({num})"
            )
        return value.tensor_split(num, dim)
    if isinstance(value, Mapping):
        parts = {key: _split(part, num, dim, name=name) for key, part in value.items()}
        return [{key: part[index] for key, part in parts.items()} for index in range(num)]
    if isinstance(value, (tuple, list)):
        columns = [_split(part, num, dim, name=name) for part in value]
        rows = [[column[index] for column in columns] for index in range(num)]
        # Named tuples take their fields one by one.
        make: Callable[..., object] = getattr(value, "_make", type(value))
        return [make(row) for row in rows]
    return [value] * num


LossFunction = Callable[[Any, Any], Tensor]

Key = tuple[int, int]
"""Stage and microbatch."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The microbatches of a run: arguments and targets, by entry.

    Entry ``chain * num_microbatches + microbatch`` belongs to a microbatch of a chain, so with one
    chain the entries are the microbatches.

    Attributes:
        args: Positional arguments of the first stage; unused on ranks without it.
        kwargs: Keyword arguments of every stage.
        targets: Second argument of the loss function; unused on ranks without the last stage.
        loss_scale: Factor of every loss in the backward.
    """

    args: Sequence[Sequence[object]]
    kwargs: Sequence[Mapping[str, object]]
    targets: Sequence[object]
    loss_scale: float = 1.0


@dataclass(slots=True)
class Chunk:
    """Tensors that live from the forward of a microbatch in a stage to its backward.

    Attributes:
        received: Inputs of the stage, leaves; empty at the start of a chain.
        outputs: Outputs with their graphs; at the end of a chain the loss.
    """

    received: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class PipelineContext:
    """Context that a function registered for a type of step gets.

    Attributes:
        rank: Rank of the pipeline.
        schedule: Schedule that is run.
        stages: This rank's stages by index.
        batch: The microbatches: args, kwargs and targets.
        losses: Detached losses so far, by entry of the batch.
        run: Runs one step the built-in way, receiving what it needs; from any thread, and from
            several at once for different microbatches. A thread starts without the autocast,
            device and stream of the one that called `run`; `hp_platform.ThreadContext` takes them
            over.
        wait_inputs: Waits until what a step reads has arrived, so that `run` does not. Done before
            the function of an overlap is called.
    """

    rank: int
    schedule: Schedule
    stages: Mapping[int, PipelineStage]
    batch: Batch
    losses: Mapping[int, Tensor]
    run: Callable[[MetaStep], None]
    wait_inputs: Callable[[MetaStep], None]


class GradientPaths:
    """Checks that an output requires grad for every microbatch of a run or for none.

    An output that does not require grad gets no gradient, and the parameters it was computed from
    do not train: right for masks, tables and frozen stages, which are so for every microbatch.
    Where some microbatches get a gradient and others do not, something was detached, or computed
    under `torch.no_grad`.
    """

    def __init__(self) -> None:
        self._first: dict[int, tuple[int, list[bool]]] = {}

    def check(
        self,
        stage: int,
        microbatch: int,
        outputs: Sequence[Tensor],
        *,
        expected: Callable[[], Specs | None],
    ) -> None:
        """Check the outputs of a forward that trains against the first microbatch's.

        Args:
            stage: Index of the stage.
            microbatch: Index of the microbatch.
            outputs: Outputs of the stage for that microbatch.
            expected: Returns the specs that the next stage expects; called only if a gradient is
                missing.

        Raises:
            ValueError: If an output requires grad for some microbatches only, and the next stage
                expects it to.
        """
        requires = [x.requires_grad for x in outputs]
        other, first = self._first.setdefault(stage, (microbatch, requires))
        for index, (before, now) in enumerate(zip(first, requires, strict=False)):
            if before == now:
                continue
            specs = expected()
            if specs is None or any(spec.has_grad for spec in specs[index : index + 1]):
                has, lacks = (other, microbatch) if before else (microbatch, other)
                raise ValueError(
                    f"output {index} of stage {stage}, microbatch {lacks} must require grad, as "
                    f"that of microbatch {has} does: it was detached, or computed under no_grad. "
                    "If it is not to train, say so in the input_spec of the next stage "
                    "(requires_grad=False)"
                )
