"""What the steps of a run work with: its microbatches, and what lives between steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hp_schedule.ir import MetaStep
from hp_schedule.runtime.stage import PipelineStage
from hp_schedule.schedule import Schedule

LossFunction = Callable[[Any, Any], Tensor]

Key = tuple[int, int]
"""Stage and microbatch."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What a run is given, all by entry.

    Entry ``chain * num_microbatches + microbatch`` belongs to a microbatch of a chain, so with one
    chain the entries are the microbatches.

    Attributes:
        args: Positional arguments of the first stage; unused on ranks without it.
        kwargs: Keyword arguments of every stage.
        targets: Second argument of the loss function; unused on ranks without the last stage.
        loss_scale: What every loss is multiplied with for the backward.
    """

    args: Sequence[Sequence[Any]]
    kwargs: Sequence[Mapping[str, Any]]
    targets: Sequence[Any]
    loss_scale: float = 1.0


@dataclass(slots=True)
class Chunk:
    """What lives from the forward of a microbatch in a stage to its backward.

    Attributes:
        received: The stage's inputs, leaves; empty at the start of a chain.
        outputs: The outputs, or the loss at the end of a chain; graphs included.
    """

    received: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class PipelineContext:
    """What a function registered for a type of step works with.

    Attributes:
        rank: Rank of the pipeline.
        schedule: What is run.
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
