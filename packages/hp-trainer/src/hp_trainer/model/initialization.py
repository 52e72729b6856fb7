"""Initial weights that depend on the seed and on each parameter's global name alone."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from hp_platform.dry_device import is_dry
from hp_trainer.config import ModelConfig
from hp_trainer.model.parameters import Parameter
from hp_trainer.model.randomness import generator

TILE = (64, 256)
"""Rows and columns of a tile; another number here is another start for every seed."""

_WINDOW = 1024
"""Tiles that are handed to threads at once: 64 MiB of numbers."""

_FEW = 1 << 20
"""Numbers below which threads cost more than they save."""

Span = tuple[int, int]


@torch.no_grad()
def initialize_parameters(
    parameters: Iterable[Parameter],
    config: ModelConfig,
    *,
    seed: int,
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Fill the local part of every parameter in place.

    A matrix is drawn in tiles of 64 x 256 numbers, each from a stream of its own that the seed, the
    parameter's name and the tile's place decide. A rank draws the tiles that it holds a part of and
    no others, so what it draws shrinks with its share of the model, and every layout has the same
    bits. Tiles are independent, so threads draw them side by side. Experts draw by their own global
    index, so the same expert starts the same wherever it lives.

    Numbers are drawn in fp32 on the CPU, and the part that is here is then cast and copied, so that
    dtype, device and layout do not change them. Of a parameter that is one part at a time.

    Args:
        parameters: Parameters under their global names.
        config: The whole model.
        seed: The run's seed.
        on_progress: Called after every tile, in this thread.
    """
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for parameter in parameters:
            if parameter.spec.kind != "matrix":
                parameter.local.fill_(1.0 if parameter.spec.kind == "norm" else 0.0)
                continue
            std = config.init_std
            if parameter.spec.is_residual:
                std /= math.sqrt(2 * config.num_layers)
            for matrix, purpose in _matrices(parameter):
                if is_dry():  # no device takes the numbers, nor has the host memory for them
                    matrix.copy_(torch.zeros((), device="cpu").expand(matrix.shape))
                    continue
                is_here = matrix.device.type == "cpu" and matrix.dtype == torch.float32
                values = matrix if is_here else torch.empty(matrix.shape, dtype=torch.float32)
                draw = partial(_draw, values, std, (seed, *purpose))
                few = torch.get_num_threads() == 1 or values.numel() < _FEW
                tiles = iter(_tiles(parameter.shape[-2:], parameter.span[-2:]))
                while window := list(islice(tiles, _WINDOW)):
                    for _ in map(draw, window) if few else pool.map(draw, window):
                        on_progress()
                if not is_here:
                    matrix.copy_(values)


def _matrices(parameter: Parameter) -> Iterator[tuple[Tensor, tuple[str | int, ...]]]:
    """Yield what is here of a parameter, matrix by matrix, and what each is to be known by."""
    if parameter.experts is None:
        yield parameter.local, (parameter.name,)
        return
    for row, expert in enumerate(parameter.experts):
        yield parameter.local[row], (parameter.name, expert)


class _Tile(NamedTuple):
    """A tile that a rank holds some of.

    Attributes:
        place: Its row and column among the tiles.
        shape: Rows and columns of it.
        held: First and last + 1 row and column that are held, in the tile.
        into: The same, in the local part.
    """

    place: tuple[int, int]
    shape: tuple[int, int]
    held: tuple[slice, slice]
    into: tuple[slice, slice]


def _tiles(shape: Sequence[int], span: Sequence[Span]) -> list[_Tile]:
    rows, columns = map(_cut, shape, span, TILE)
    return [
        _Tile((row, column), (height, width), (held_rows, held_columns), (into_rows, into_columns))
        for row, height, held_rows, into_rows in rows
        for column, width, held_columns, into_columns in columns
    ]


def _cut(size: int, span: Span, step: int) -> list[tuple[int, int, slice, slice]]:
    """Return of one dim each tile: its index, its size, the part that is here, and its place."""
    first, last = span
    pieces = []
    for index in range(first // step, -(-last // step) if last > first else 0):
        start, stop = index * step, min(size, (index + 1) * step)
        low, high = max(first, start), min(last, stop)
        held, into = slice(low - start, high - start), slice(low - first, high - first)
        pieces.append((index, stop - start, held, into))
    return pieces


def _draw(values: Tensor, std: float, key: tuple[int, *tuple[str | int, ...]], tile: _Tile) -> None:
    """Draw a tile into the local part of a matrix; the seed, then what that is known by."""
    seed, *purpose = key
    stream = generator(seed, "init", *purpose, *tile.place)
    here = values[tile.into]
    if here.shape == tile.shape and here.is_contiguous():
        here.normal_(0.0, std, generator=stream)
        return
    drawn = torch.empty(tile.shape, dtype=torch.float32, device="cpu")
    here.copy_(drawn.normal_(0.0, std, generator=stream)[tile.held])
