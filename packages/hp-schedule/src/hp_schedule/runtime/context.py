"""State of a run that its steps work with: microbatches, and tensors that live between steps."""

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
