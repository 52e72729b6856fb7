"""The plan of an exchange as data: who orthogonalises which matrix, and what travels.

Every rank makes the same plan from the same layouts, without a message.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hp_optim.layout import Indices, Layout, meet
from hp_optim.matrices import Matrix, Split, matrices_of
from hp_optim.newton_schulz import flops


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a matrix that a rank has.

    Attributes:
        matrix: Matrix.
        place: Place in the local stack; 0 if the parameter is no stack.
        rows: Rows of the local tensor.
        cols: Columns of the local tensor.
        to_rows: Rows of the parameter's own matrix, before it is transposed, where they belong.
        to_cols: Columns there.
    """

    matrix: Matrix
    place: int
    rows: Indices
    cols: Indices
    to_rows: Indices
    to_cols: Indices

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of rows and columns."""
        return len(self.rows), len(self.cols)

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return len(self.rows) * len(self.cols)

    @property
    def is_whole(self) -> bool:
        """Tell whether the piece is all of the matrix, in order."""
        full = (range(len(self.matrix.rows)), range(len(self.matrix.cols)))
        return (self.to_rows, self.to_cols) == full


Pieces = tuple[tuple[Piece, ...], ...]
"""Pieces by the rank that they are sent to or come from."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Share of one rank in matrices that are exchanged at once.

    Attributes:
        sent: Own pieces, by the owner that they are sent to.
        received: Pieces of owned matrices, by the rank that they come from.
        returned: Pieces of owned matrices, by the rank that gets the update of them.
        applied: Own pieces, by the owner from whom the update comes.
    """

    sent: Pieces
    received: Pieces
    returned: Pieces
    applied: Pieces


@dataclass(frozen=True, slots=True)
class Plan:
    """Owners of all matrices of parameters that lie on the same ranks.

    Attributes:
        ranks: Global ranks.
        layouts: Layout of each parameter.
        owners: Matrix -> index in `ranks` of the rank that orthogonalises it.
        holders: Matrix -> indices in `ranks` of the ranks that have a part of it.
        alone: Matrices that a single rank has: nothing of them travels.
        shared: The other matrices, in the buckets in which they are exchanged.
    """

    ranks: tuple[int, ...]
    layouts: tuple[Layout, ...]
    owners: dict[Matrix, int]
    holders: dict[Matrix, tuple[int, ...]]
    alone: tuple[Matrix, ...]
    shared: tuple[tuple[Matrix, ...], ...]

    def piece(self, matrix: Matrix, index: int) -> Piece:
        """Return the part of a matrix that the rank of an index has."""
        *stack, rows, cols = self.layouts[matrix.parameter].held[index]
        here, there = meet(rows, matrix.rows), meet(cols, matrix.cols)
        place = stack[0].index(matrix.place) if stack else 0
        return Piece(matrix, place, here[0], there[0], here[1], there[1])

    def sources(self, matrix: Matrix) -> list[int]:
        """Return the indices of ranks that send their pieces: of those with copies the nearest."""
        owner = self.owners[matrix]
        nearest: dict[tuple[Indices, Indices], int] = {}
        for index in sorted(self.holders[matrix], key=lambda index: (abs(index - owner), index)):
            piece = self.piece(matrix, index)
            nearest.setdefault((piece.to_rows, piece.to_cols), index)
        return sorted(nearest.values())

    def bucket(self, number: int, me: int) -> Bucket:
        """Return what the rank of index `me` does for a bucket."""
        everyone = range(len(self.ranks))
        parts: dict[str, list[list[Piece]]] = {
            name: [[] for _ in everyone] for name in ("sent", "received", "returned", "applied")
        }
        for matrix in self.shared[number]:
            owner = self.owners[matrix]
            if owner == me:
                for index in self.holders[matrix]:
                    parts["returned"][index].append(self.piece(matrix, index))
                for index in self.sources(matrix):
                    parts["received"][index].append(self.piece(matrix, index))
            if me in self.holders[matrix]:
                mine = self.piece(matrix, me)
                parts["applied"][owner].append(mine)
                if me in self.sources(matrix):
                    parts["sent"][owner].append(mine)
        return Bucket(**{name: tuple(map(tuple, pieces)) for name, pieces in parts.items()})

    def digest(self) -> str:
        """Return a digest, which is the same where plans are."""
        text = repr((self.ranks, self.layouts, [*self.owners.items()], self.shared))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_plan(
    layouts: Sequence[Layout], splits: Sequence[Split], *, steps: int, elements: int
) -> Plan:
    """Give every matrix one owner among the ranks that have parts of it, balanced by flops.

    The largest matrices come first; each goes to the rank with the least work so far.

    Args:
        layouts: Layout of each parameter, all on the same ranks.
        splits: Split of each parameter.
        steps: Iterations of Newton-Schulz.
        elements: Elements for each rank after which a bucket is full.

    Raises:
        ValueError: If a parameter is no matrix and no stack of them, or a split does not fit.
    """
    ranks = layouts[0].ranks
    holders: dict[Matrix, tuple[int, ...]] = {}
    for number, (layout, split) in enumerate(zip(layouts, splits, strict=True)):
        matrices = matrices_of(number, layout.shape, split)
        by_place: dict[int, list[int]] = defaultdict(list)
        for index, held in enumerate(layout.held):
            for place in held[0] if len(held) > 2 else (0,):
                by_place[place].append(index)
        for matrix in matrices:
            holders[matrix] = tuple(
                index
                for index in by_place[matrix.place]
                if _has(layout.held[index], matrix.rows, matrix.cols)
            )
    work = {matrix: flops(matrix.shape, steps) for matrix in holders}
    loads = [0] * len(ranks)
    owners: dict[Matrix, int] = {}

    def give(matrix: Matrix) -> None:
        owner = min(holders[matrix], key=lambda index: (loads[index], index))
        owners[matrix] = owner
        loads[owner] += work[matrix]

    alone = tuple(matrix for matrix, those in holders.items() if len(those) == 1)
    for matrix in alone:
        give(matrix)
    buckets: list[list[Matrix]] = []
    room = 0
    for matrix in sorted((m for m in holders if len(holders[m]) > 1), key=lambda m: -work[m]):
        give(matrix)
        if room <= 0:
            buckets.append([])
            room = elements * len(ranks)
        buckets[-1].append(matrix)
        room -= len(matrix.rows) * len(matrix.cols)
    return Plan(ranks, tuple(layouts), owners, holders, alone, tuple(map(tuple, buckets)))


def _has(held: Sequence[Indices], rows: Indices, cols: Indices) -> bool:
    return len(meet(held[-2], rows)[0]) > 0 and len(meet(held[-1], cols)[0]) > 0
