"""State of a run: its microbatches, tensors that live between steps, checks over microbatches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hp_schedule.ir import MetaStep
from hp_schedule.runtime.specs import Specs
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
