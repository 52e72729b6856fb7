"""What one rank gets of a global batch, cut into microbatches.

Shape symbols: B sequences of a microbatch, S positions that attention sees on this rank.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hp_context import Documents
from hp_train.config import Config
from hp_train.data.dataset import Dataset
from hp_train.layout.mesh import Mesh
from hp_train.layout.sequence import SequenceShare
from hp_train.model import DropoutKey, Microbatch, look_ahead


class Share(NamedTuple):
    """The microbatches of one rank, as a pipeline takes them.

    Attributes:
        args: Tokens of each, int64 [B, S].
        kwargs: The `Microbatch` of each.
        targets: The token after each, int64 [B, S], negative where none is to be learned.
    """

    args: list[tuple[Tensor]]
    kwargs: list[dict[str, Any]]
    targets: list[Tensor]


class Batches:
    """Cuts global batches.

    Args:
        config: Configuration of the run.
        mesh: Mesh of the run.
        sequence: Which positions are this rank's.
        device: Device that receives the tensors of a batch.
    """

    def __init__(
        self, config: Config, mesh: Mesh, sequence: SequenceShare, *, device: torch.device
    ) -> None:
        self._config, self._mesh, self._sequence, self._device = config, mesh, sequence, device

    def cut(self, data: Dataset, first: int, *, step: int | None = None) -> Share:
        """Return this rank's share of the global batch that starts at a sequence.

        Args:
            data: Dataset to read.
            first: Index of the sequence.
            step: Number of the training step, from 0, which decides what is dropped; None: outside
                training.
        """
        config, sequence = self._config, self._sequence
        size, whole = config.train.microbatch_size, config.train.global_batch_size
        batch = range(first, first + whole)
        depths = range(0 if step is None else config.model.num_mtp_modules)
        num_ahead = tuple(data.num_targets(batch, ahead=depth + 1) for depth in depths)
        mine = whole // self._mesh.layout.dp
        first += self._mesh.dp_index * mine
        share = Share([], [], [])
        for start in range(first, first + mine, size):
            indices = range(start, start + size)
            tokens, targets, lengths = data.batch(indices)
            limits = tuple(map(Documents, lengths)) if any(len(n) > 1 for n in lengths) else None
            ahead = look_ahead(tokens, targets, num_ahead).map(sequence.shard) if depths else None
            key = None
            if step is not None:
                sequence_index = self._to_device(torch.tensor(indices))
                key = DropoutKey(config.run.seed, step, sequence_index, sequence.between)
            microbatch = Microbatch(
                whole,
                key,
                positions=sequence.attended,
                documents=limits,
                ahead=ahead and ahead.map(self._to_device),
            )
            share.args.append((self._to_device(sequence.shard(tokens)),))
            share.kwargs.append({"microbatch": microbatch})
            share.targets.append(self._to_device(sequence.shard(targets)))
        return share

    def _to_device(self, x: Tensor) -> Tensor:
        """Copy from the CPU without waiting for what the device still computes."""
        if self._device.type == "cuda":
            x = x.pin_memory()
        return x.to(self._device, non_blocking=True)
