"""This rank's share of a planned step: its documents joined, dealt out and put on the device.

Shape symbols: S positions of a microbatch on this rank.
"""

import torch
from torch import Tensor

from hp_data.dataset import Dataset, Piece
from hp_packing.joined import Joined, join
from hp_packing.plan import PlannedMicrobatch
from hp_trainer.layout.sequence import SequenceShare
from hp_trainer.model import DropoutKey, Microbatch
from hp_trainer.model.block import Balanced
from hp_trainer.training.batches import Batches, Share


def share_of(
    batches: Batches,
    data: Dataset,
    pieces: tuple[Piece, ...],
    microbatches: tuple[PlannedMicrobatch, ...],
    *,
    step: int,
) -> Share:
    """Return this rank's share of the global batch of a planned step.

    Args:
        batches: Knows the mesh, and which positions are here.
        data: Dataset to read.
        pieces: Documents of the global batch.
        microbatches: Those of this rank's team.
        step: Number of the training step, from 0.
    """
    depths = range(1, batches.config.model.num_mtp_modules + 1)
    num_ahead = tuple(sum(piece.num_targets(ahead=d) for piece in pieces) for d in depths)
    num_targets = sum(piece.num_targets() for piece in pieces)
    num_tokens = sum(piece.length for piece in pieces)
    places: list[Tensor] = []
    share = Share([], [], [], num_targets, places)
    for each in microbatches:
        documents = [pieces[document] for document in each.documents]
        joined = join(data, documents, padding=each.padding, num_ahead=num_ahead)
        sequence = batches.sequence.of_deal(each.deal)
        here = sequence.shard(joined.places)
        microbatch = _microbatch(batches, joined, sequence, here, num_tokens=num_tokens, step=step)
        assert microbatch.targets is not None
        share.args.append((batches.to_device(sequence.shard(joined.tokens)),))
        share.kwargs.append({"microbatch": microbatch})
        share.targets.append(microbatch.targets)
        places.append(here[2:])
    return share


def _microbatch(
    batches: Batches,
    joined: Joined,
    sequence: SequenceShare,
    here: Tensor,
    *,
    num_tokens: int,
    step: int,
) -> Microbatch:
    """Return this rank's part of a planned microbatch, of whose places some are here [4, S]."""
    config = batches.config

    def take(x: Tensor) -> Tensor:
        return batches.to_device(sequence.shard(x))

    places = batches.to_device(here)
    document, _, of_sequence, place = batches.between(places)
    lengths = joined.lengths[: joined.num_documents]
    is_one = len(joined.lengths) == 1 and batches.mesh.size("cp") == 1
    return Microbatch(
        config.train.global_batch_size,
        DropoutKey(config.run.seed, step, of_sequence[None], place),
        positions=places[1],
        documents=None if is_one else (sequence.limits(joined.lengths),),
        padding=(document < 0)[None] if len(lengths) < len(joined.lengths) else None,
        balanced=Balanced(document, batches.to_device(torch.tensor(lengths)), num_tokens),
        targets=take(joined.targets),
        ahead=joined.ahead and joined.ahead.map(take),
    )
