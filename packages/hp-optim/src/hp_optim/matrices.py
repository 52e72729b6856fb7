"""The matrices of a parameter: one, a stack of them, or several that are fused."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

from hp_optim.layout import Indices, indices


@dataclass(frozen=True, slots=True)
class Split:
    """The way in which a parameter is taken apart into the matrices of a checkpoint.

    Each matrix is orthogonalised by itself. A parameter of three dims is a stack: it is taken apart
    along its first dim, and each matrix of the stack as this says.

    Attributes:
        sizes: Rows (or columns) of each fused matrix, such as those of query, key and value; empty:
            there is one matrix.
        dim: Dim of the matrix along which they are fused: 0 for rows, 1 for columns.
        repeats: Number of times that blocks of these sizes follow one another: the number of
            key-value heads where heads are grouped, `sizes=(1, 1)` with half of all rows where gate
            and up alternate.
        transposed: Whether rows here are columns of the checkpoint. The learning rate depends on
            that.
    """

    sizes: tuple[int, ...] = ()
    dim: int = 0
    repeats: int = 1
    transposed: bool = False

    def __post_init__(self) -> None:
        if self.dim not in {0, 1}:
            raise ValueError(f"dim ({self.dim}) of a split must be 0 or 1")
        if self.repeats < 1 or any(size < 1 for size in self.sizes):
            raise ValueError(f"sizes {self.sizes} and repeats ({self.repeats}) must be positive")

    @classmethod
    def of(cls, given: "Split | Sequence[int]") -> "Split":
        """Return a split, which sizes of rows stand for."""
        return given if isinstance(given, Split) else cls(tuple(given))


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of a parameter, which is orthogonalised by itself.

    Attributes:
        parameter: Number of the parameter.
        place: Place in a stack; 0 if the parameter is no stack.
        rows: Rows of the parameter that it has.
        cols: Columns of the parameter that it has.
        transposed: Whether it is the transpose of these.
    """

    parameter: int
    place: int
    rows: Indices
    cols: Indices
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Return rows and columns as in the checkpoint."""
        rows, cols = len(self.rows), len(self.cols)
        return (cols, rows) if self.transposed else (rows, cols)


def matrices_of(parameter: int, shape: Sequence[int], split: Split) -> list[Matrix]:
    """Take a parameter apart.

    Args:
        parameter: Number of the parameter.
        shape: `[rows, columns]`, or `[stack, rows, columns]`.
        split: What each matrix of the stack consists of.

    Raises:
        ValueError: If the shape is neither, or the sizes do not add up to it.
    """
    if len(shape) not in {2, 3}:
        raise ValueError(
            f"shape {tuple(shape)} must be of a matrix or of a stack of matrices: other parameters "
            "belong into a group with algorithm='adamw'"
        )
    *stack, rows, cols = shape
    sides: list[list[Indices]] = [[range(rows)], [range(cols)]]
    if split.sizes:
        length, block = (rows, cols)[split.dim], sum(split.sizes)
        if block * split.repeats != length:
            raise ValueError(
                f"sizes {split.sizes} times repeats ({split.repeats}) must add up to dim "
                f"{split.dim} of the matrix ({length})"
            )
        starts = range(0, length, block)
        sides[split.dim] = [
            indices(tuple(chain.from_iterable(range(s + first, s + end) for s in starts)))
            for first, end in pairwise(accumulate(split.sizes, initial=0))
        ]
    return [
        Matrix(parameter, place, row, col, split.transposed)
        for place in range(stack[0] if stack else 1)
        for row in sides[0]
        for col in sides[1]
        if len(row) and len(col)
    ]
