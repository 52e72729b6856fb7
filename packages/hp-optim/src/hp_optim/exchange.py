"""Run a plan: pieces to the owners, matrices orthogonalised, updates back, bucket by bucket.

While a bucket is orthogonalised, the pieces of the next bucket travel to their owners and the
updates of the bucket before travel back. All ranks start the same exchanges in the same order.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_optim.layout import Indices
from hp_optim.matrices import Matrix
from hp_optim.plan import Bucket, Piece, Pieces, Plan
from hp_platform import Pending, launch_all_to_all


class Parameters(Protocol):
    """Parameters of a plan, as their optimizer reads and writes them."""

    def read(self, piece: Piece) -> Tensor | None:
        """Return the direction of a piece before it is orthogonalised; None without a gradient."""

    def orthogonalize(self, matrix: Matrix, direction: Tensor) -> Tensor:
        """Return the orthogonal factor of a whole matrix, which is as in the checkpoint."""

    def write(self, piece: Piece, update: Tensor) -> None:
        """Move a piece by its part of the orthogonal factor."""


class Exchange(NamedTuple):
    """A plan on this rank.

    Attributes:
        group: Group of the ranks of the plan; None if it is this rank alone.
        parameters: Parameters of the plan.
        alone: Pieces that are whole matrices which no other rank has.
        buckets: Share of this rank in each bucket.
        dtype: Dtype in which directions and updates travel.
        device: Device of the parameters.
    """

    group: ProcessGroup | None
    parameters: Parameters
    alone: tuple[Piece, ...]
    buckets: tuple[Bucket, ...]
    dtype: torch.dtype
    device: torch.device


def make_exchange(
    plan: Plan,
    group: ProcessGroup | None,
    parameters: Parameters,
    *,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Exchange:
    """Find out what a rank does for a plan.

    Args:
        plan: Plan.
        group: Group of its ranks; None if there is one.
        parameters: Parameters of the plan.
        rank: Global rank of this process.
        dtype: Dtype in which directions and updates travel.
        device: Device of the parameters.
    """
    me = plan.ranks.index(rank)
    alone = tuple(plan.piece(matrix, me) for matrix in plan.alone if plan.owners[matrix] == me)
    buckets = tuple(plan.bucket(number, me) for number in range(len(plan.shared)))
    return Exchange(group, parameters, alone, buckets, dtype, device)


def run(exchanges: Iterable[Exchange]) -> None:
    """Orthogonalise every matrix once in the world and move all parameters."""
    ready = [*exchanges]
    steps = [_Step(exchange, bucket) for exchange in ready for bucket in exchange.buckets]
    gathered = [step.gather() for step in steps[:1]]
    for exchange in ready:
        _move_alone(exchange)
    returned: list[Pending[Tensor]] = []
    for number, step in enumerate(steps):
        gathered += [following.gather() for following in steps[number + 1 : number + 2]]
        returned.append(step.give_back(step.compute(gathered[number].wait())))
        if number > 0:
            steps[number - 1].move(returned[number - 1].wait())
    for step, last in zip(steps[-1:], returned[-1:], strict=True):
        step.move(last.wait())


def _move_alone(exchange: Exchange) -> None:
    for piece in exchange.alone:
        direction = exchange.parameters.read(piece)
        if direction is not None:
            whole = _assembled(piece.matrix, [(piece, direction)], exchange.dtype)
            update = exchange.parameters.orthogonalize(piece.matrix, whole)
            exchange.parameters.write(piece, _part(piece, update))


class _Step(NamedTuple):
    """A bucket of an exchange."""

    exchange: Exchange
    bucket: Bucket

    def gather(self) -> Pending[Tensor]:
        """Start to send this rank's pieces to the owners; a missing gradient counts as zero."""
        sent = self._empty(self.bucket.sent)
        for piece, place in _places(self.bucket.sent, sent):
            direction = self.exchange.parameters.read(piece)
            if direction is None:
                place.zero_()
            else:
                place.copy_(direction)
        return self._launch(sent, self.bucket.sent, self.bucket.received)

    def compute(self, arrived: Tensor) -> dict[Matrix, Tensor]:
        """Orthogonalise the matrices that this rank owns."""
        parts: dict[Matrix, list[tuple[Piece, Tensor]]] = defaultdict(list)
        for piece, place in _places(self.bucket.received, arrived):
            parts[piece.matrix].append((piece, place))
        return {
            matrix: self.exchange.parameters.orthogonalize(
                matrix, _assembled(matrix, pieces, self.exchange.dtype)
            )
            for matrix, pieces in parts.items()
        }

    def give_back(self, updates: dict[Matrix, Tensor]) -> Pending[Tensor]:
        """Start to send updates to all ranks that have a part of them."""
        sent = self._empty(self.bucket.returned)
        for piece, place in _places(self.bucket.returned, sent):
            place.copy_(_part(piece, updates[piece.matrix]))
        return self._launch(sent, self.bucket.returned, self.bucket.applied)

    def move(self, arrived: Tensor) -> None:
        """Move this rank's pieces by their updates."""
        for piece, place in _places(self.bucket.applied, arrived):
            self.exchange.parameters.write(piece, place)

    def _empty(self, pieces: Pieces) -> Tensor:
        numel = sum(_sizes(pieces))
        return torch.empty(numel, dtype=self.exchange.dtype, device=self.exchange.device)

    def _launch(self, sent: Tensor, outgoing: Pieces, incoming: Pieces) -> Pending[Tensor]:
        assert self.exchange.group is not None, "shared matrices have a group"
        return launch_all_to_all(
            sent,
            input_splits=_sizes(outgoing),
            output_splits=_sizes(incoming),
            group=self.exchange.group,
        )


def _sizes(pieces: Pieces) -> list[int]:
    return [sum(piece.numel for piece in of_rank) for of_rank in pieces]


def _places(pieces: Pieces, buffer: Tensor) -> list[tuple[Piece, Tensor]]:
    """Return all pieces with their places in a buffer."""
    everything = [piece for of_rank in pieces for piece in of_rank]
    parts = buffer.split([piece.numel for piece in everything])
    return [(piece, part.view(piece.shape)) for piece, part in zip(everything, parts, strict=True)]


def _assembled(
    matrix: Matrix, pieces: Sequence[tuple[Piece, Tensor]], dtype: torch.dtype
) -> Tensor:
    """Put pieces together to a matrix as in the checkpoint."""
    [(piece, whole), *_] = pieces
    if not piece.is_whole:
        whole = whole.new_empty((len(matrix.rows), len(matrix.cols)), dtype=dtype)
        for each, part in pieces:
            whole[select(each.to_rows, each.to_cols, whole.device)] = part.to(dtype)
    return whole.T.contiguous() if matrix.transposed else whole


def _part(piece: Piece, update: Tensor) -> Tensor:
    """Return the part of an orthogonal factor that belongs to a piece."""
    update = update.T if piece.matrix.transposed else update
    return update[select(piece.to_rows, piece.to_cols, update.device)]


Selection = tuple[slice | Tensor, slice | Tensor]
_selections: dict[tuple[Indices, Indices, torch.device], Selection] = {}


def select(rows: Indices, cols: Indices, device: torch.device) -> Selection:
    """Return what picks rows and columns of a matrix: a view where both have one step."""
    key = (rows, cols, device)
    if key not in _selections:
        first, second = _axis(rows, device), _axis(cols, device)
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            first = first[:, None]
        _selections[key] = first, second
    return _selections[key]


def _axis(numbers: Indices, device: torch.device) -> slice | Tensor:
    if isinstance(numbers, range):
        return slice(numbers.start, numbers.stop, numbers.step)
    return torch.tensor(numbers, device=device)
