"""The share of a global batch that one rank gets, cut into microbatches, and where steps come from.

Shape symbols: B sequences of a microbatch, S positions that attention sees on this rank.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hp_base.errors import DataError
from hp_context import Documents
from hp_data.dataset import Dataset
from hp_platform import Runtime, all_gather_json
from hp_schedule.runtime import PipelineScheduleRuntime
from hp_trainer.config import Config
from hp_trainer.layout.mesh import Mesh
from hp_trainer.layout.sequence import SequenceShare
from hp_trainer.model import DropoutKey, Microbatch, look_ahead
from hp_trainer.model.attention import Limits
from hp_trainer.model.parallelize import Pipeline
from hp_trainer.plugins import planned_steps
from hp_trainer.training.metrics import StepMetrics


class Share(NamedTuple):
    """The microbatches of one rank, as a pipeline takes them.

    Attributes:
        args: Tokens of each, int64 [B, S].
        kwargs: The `Microbatch` of each.
        targets: The token after each, int64 [B, S], negative where none is to be learned.
        num_targets: Targets of the global batch that are to be learned, the same on all ranks.
        places: Of a planned step, for each microbatch the global index of the sequence of the data
            that each position is of, and its place there: int64 [2, S] on the CPU; -1 of padding.
    """

    args: list[tuple[Tensor]]
    kwargs: list[dict[str, Any]]
    targets: list[Tensor]
    num_targets: int
    places: Sequence[Tensor] = ()


class PlannedDocument(Protocol):
    """A document of a global batch, as far as a recorder of the run looks at it."""

    @property
    def sequence(self) -> int:
        """Return the global index of its sequence in the data."""
        ...


class PlannedStep(Protocol):
    """A step whose microbatches, ranks and order are its own."""

    @property
    def pieces(self) -> Sequence[PlannedDocument]:
        """Return the documents of the global batch."""
        ...

    @property
    def ends(self) -> dict[int, int]:
        """Return where documents of each sequence end there, by the sequence's global index."""
        ...

    def runner(self, pipeline: Pipeline, mesh: Mesh) -> PipelineScheduleRuntime:
        """Return what runs the step on this rank."""
        ...

    def share(self, batches: "Batches", data: Dataset, *, step: int) -> Share:
        """Return this rank's share of the global batch."""
        ...

    def told_in(self, metrics: StepMetrics) -> StepMetrics:
        """Return metrics that also say what was planned."""
        ...


class Batches:
    """Cuts global batches into what one rank gets.

    Attributes:
        config: Configuration of the run.
        mesh: Mesh of the run.
        sequence: Which positions are this rank's.

    Args:
        config: Configuration of the run.
        mesh: Mesh of the run.
        sequence: Which positions are this rank's.
        device: Device that receives the tensors of a batch.
    """

    def __init__(
        self, config: Config, mesh: Mesh, sequence: SequenceShare, *, device: torch.device
    ) -> None:
        self.config, self.mesh, self.sequence, self._device = config, mesh, sequence, device

    def cut(self, data: Dataset, first: int, *, step: int | None = None) -> Share:
        """Return this rank's share of the global batch that starts at a sequence.

        Args:
            data: Dataset to read.
            first: Index of the sequence.
            step: Number of the training step, from 0, which decides what is dropped; None: outside
                training.
        """
        config, sequence = self.config, self.sequence
        size, whole = config.train.microbatch_size, config.train.global_batch_size
        batch = range(first, first + whole)
        depths = range(0 if step is None else config.model.num_mtp_modules)
        num_ahead = tuple(data.num_targets(batch, ahead=depth + 1) for depth in depths)
        mine = whole // self.mesh.layout.dp
        start = self.mesh.dp_index * mine
        indices, *others = batch[start : start + mine], batch[:start], batch[start + mine :]
        tokens, targets, lengths, whole_padding = data.batch(indices)
        num_targets = int((targets >= 0).sum()) + sum(map(data.num_targets, others))
        dealt = [
            sequence.dealt(each, windows=config.model.windows, heads=config.mesh.heads_degree)
            for each in (lengths if config.mesh.cp_deal else ())
        ]
        take = partial(self._mine, dealt=dealt)
        ahead = look_ahead(tokens, targets, num_ahead).map(take) if depths else None
        sequence_index = self.to_device(torch.tensor(indices))
        tokens, targets = take(tokens), take(targets)
        padding = None if whole_padding is None else self.between(take(whole_padding))
        share = Share([], [], [], num_targets)
        for start in range(0, mine, size):
            part = slice(start, start + size)
            if dealt:  # of one sequence
                sequence = dealt[start]
                documents: Limits = (sequence.limits(lengths[start]),)
            else:
                is_packed = max(map(len, lengths[part])) > 1
                documents = tuple(map(Documents, lengths[part])) if is_packed else None
            key = None
            if step is not None:
                key = DropoutKey(config.run.seed, step, sequence_index[part], sequence.between)
            microbatch = Microbatch(
                whole,
                key,
                positions=sequence.attended,
                documents=documents,
                padding=None if padding is None else padding[part],
                targets=targets[part],
                ahead=ahead and ahead.map(itemgetter(part)),
            )
            share.args.append((tokens[part],))
            share.kwargs.append({"microbatch": microbatch})
            share.targets.append(targets[part])
        return share

    def planned(self, data: Dataset, planned: PlannedStep, *, step: int) -> Share:
        """Return this rank's share of the global batch of a planned step.

        Args:
            data: Dataset to read.
            planned: The plan, and the documents that it is of.
            step: Number of the training step, from 0.
        """
        return planned.share(self, data, step=step)

    def _mine(self, x: Tensor, *, dealt: Sequence[SequenceShare]) -> Tensor:
        """Return this rank's positions of whole sequences [B, S], on the device."""
        if not dealt:
            return self.to_device(self.sequence.shard(x))
        rows = zip(dealt, x.split(1), strict=True)
        return self.to_device(torch.cat([sequence.shard(row) for sequence, row in rows]))

    def between(self, x: Tensor) -> Tensor:
        """Return what is here between layers, of positions that attention sees [B, S]."""
        return x.chunk(self.mesh.size("tp"), dim=1)[self.mesh.index("tp")]

    def to_device(self, x: Tensor) -> Tensor:
        """Copy from the CPU without waiting for what the device still computes."""
        if self._device.type == "cuda":
            x = x.pin_memory()
        return x.to(self._device, non_blocking=True)


class StepSource(Protocol):
    """Makes steps, the same on every rank; `str()` says in a line how."""

    def take(self, first: int, *, steps: int) -> PlannedStep:
        """Return the step whose batch begins with a sequence. All ranks call this together.

        Args:
            first: Global index of the first sequence.
            steps: Steps of the run that are left, this one included.
        """
        ...

    def close(self) -> None:
        """Make no more steps."""
        ...


def step_source(
    config: Config, mesh: Mesh, data: Dataset, *, runtime: Runtime, vocab_size: int
) -> StepSource | None:
    """Make the source of steps that `data.packing` asks for. All ranks call this together.

    Args:
        config: Configuration of the run.
        mesh: Mesh of the run.
        data: Training data.
        runtime: The initialised world.
        vocab_size: Rows of the embedding.

    Returns:
        None: batches are cut as they come.

    Raises:
        hp_base.errors.ConfigError: When the package that makes such steps is not installed.
    """
    if config.data.packing != "planned":
        return None
    make: Callable[..., StepSource] = planned_steps().load()
    return make(config, mesh, data, runtime=runtime, vocab_size=vocab_size)


def require_same_data(digests: tuple[str, ...], *, control: dist.ProcessGroup) -> None:
    """Compare what the ranks read: nodes without shared storage each tokenise their own copy.

    Args:
        digests: Digests of this rank's splits.
        control: Group over all ranks for objects.

    Raises:
        DataError: On every rank, when two of them differ.
    """
    everyone = all_gather_json(digests, of=tuple[str, ...], group=control)
    other = next((rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]), None)
    if other is not None:
        raise DataError(f"ranks 0 and {other} must read the same text, but their tokens differ")
