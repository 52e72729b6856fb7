"""What one rank gets of a global batch, cut into microbatches.

Shape symbols: B sequences of a microbatch, S positions that attention sees on this rank.
"""

from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hp_context import Documents
from hp_data.dataset import Dataset
from hp_train.config import Config
from hp_train.layout.mesh import Mesh
from hp_train.layout.sequence import SequenceShare
from hp_train.model import DropoutKey, Microbatch, look_ahead
from hp_train.model.attention import Limits
from hp_train.model.block import Balanced
from hp_train.training.joined import Joined, join
from hp_train.training.planned import PlannedStep


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
        start = self._mesh.dp_index * mine
        indices, *others = batch[start : start + mine], batch[:start], batch[start + mine :]
        tokens, targets, lengths, whole_padding = data.batch(indices)
        num_targets = int((targets >= 0).sum()) + sum(map(data.num_targets, others))
        dealt = [
            sequence.dealt(each, windows=config.model.windows, heads=config.mesh.heads_degree)
            for each in (lengths if config.mesh.cp_deal else ())
        ]
        take = partial(self._mine, dealt=dealt)
        ahead = look_ahead(tokens, targets, num_ahead).map(take) if depths else None
        sequence_index = self._to_device(torch.tensor(indices))
        tokens, targets = take(tokens), take(targets)
        padding = None if whole_padding is None else self._between(take(whole_padding))
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
        pieces, depths = planned.pieces, range(1, self._config.model.num_mtp_modules + 1)
        num_ahead = tuple(sum(piece.num_targets(ahead=d) for piece in pieces) for d in depths)
        num_targets = sum(piece.num_targets() for piece in pieces)
        num_tokens = sum(piece.length for piece in pieces)
        places: list[Tensor] = []
        share = Share([], [], [], num_targets, places)
        for each in planned.plan.teams[self._mesh.dp_index].microbatches:
            documents = [pieces[document] for document in each.documents]
            joined = join(data, documents, padding=each.padding, num_ahead=num_ahead)
            sequence = self._sequence.of_deal(each.deal)
            here = sequence.shard(joined.places)
            microbatch = self._of_plan(joined, sequence, here, num_tokens=num_tokens, step=step)
            assert microbatch.targets is not None
            share.args.append((self._to_device(sequence.shard(joined.tokens)),))
            share.kwargs.append({"microbatch": microbatch})
            share.targets.append(microbatch.targets)
            places.append(here[2:])
        return share

    def _of_plan(
        self, joined: Joined, sequence: SequenceShare, here: Tensor, *, num_tokens: int, step: int
    ) -> Microbatch:
        """This rank's part of a planned microbatch, of whose places some are here [4, S]."""
        config = self._config

        def take(x: Tensor) -> Tensor:
            return self._to_device(sequence.shard(x))

        places = self._to_device(here)
        document, _, of_sequence, place = self._between(places)
        lengths = joined.lengths[: joined.num_documents]
        is_one = len(joined.lengths) == 1 and self._mesh.size("cp") == 1
        return Microbatch(
            config.train.global_batch_size,
            DropoutKey(config.run.seed, step, of_sequence[None], place),
            positions=places[1],
            documents=None if is_one else (sequence.limits(joined.lengths),),
            padding=(document < 0)[None] if len(lengths) < len(joined.lengths) else None,
            balanced=Balanced(document, self._to_device(torch.tensor(lengths)), num_tokens),
            targets=take(joined.targets),
            ahead=joined.ahead and joined.ahead.map(take),
        )

    def _mine(self, x: Tensor, *, dealt: Sequence[SequenceShare]) -> Tensor:
        """This rank's positions of whole sequences [B, S], on the device."""
        if not dealt:
            return self._to_device(self._sequence.shard(x))
        rows = zip(dealt, x.split(1), strict=True)
        return self._to_device(torch.cat([sequence.shard(row) for sequence, row in rows]))

    def _between(self, x: Tensor) -> Tensor:
        """Of what attention sees here [B, S], what is here between layers."""
        return x.chunk(self._mesh.size("tp"), dim=1)[self._mesh.index("tp")]

    def _to_device(self, x: Tensor) -> Tensor:
        """Copy from the CPU without waiting for what the device still computes."""
        if self._device.type == "cuda":
            x = x.pin_memory()
        return x.to(self._device, non_blocking=True)
