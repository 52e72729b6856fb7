"""Initial weights: the same bits in every layout, and of each rank no more than its part."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from msgspec.structs import replace as changed
from torch import Tensor

from hp_platform.testing import watch_operators
from hp_trainer.config import ModelConfig
from hp_trainer.config.options import resolve
from hp_trainer.layout.ranks import chunk
from hp_trainer.model import TransformerStage, initialization
from hp_trainer.model.initialization import TILE, initialize_parameters
from hp_trainer.model.parameters import Parameter, named_parameters

Span = tuple[int, int]


def whole_model(seed: int = 0, **keys: Any) -> tuple[list[Parameter], ModelConfig]:
    """All parameters of a model with matrices of several tiles, none a multiple of them."""
    preset = resolve("debug-qwen3-moe", env={}).config.model
    config = changed(preset, **({"dim": 288, "num_layers": 1, "dense_hidden": 520} | keys))
    stage = TransformerStage(config, 301, layers=range(1), first=True, last=True)
    parameters = named_parameters(stage)
    initialize_parameters(parameters, config, seed=seed)
    return parameters, config


def part_of(parameter: Parameter, span: tuple[Span, ...], dtype: torch.dtype) -> Parameter:
    """The parameter as a rank has it that holds a part."""
    shape = [stop - start for start, stop in span]
    return replace(parameter, span=span, local=torch.full(shape, math.nan, dtype=dtype))


def spans(shape: tuple[int, ...], pieces: int, dim: int) -> list[tuple[Span, ...]]:
    """Parts of a shape that is cut along a dim."""
    found = []
    for index in range(pieces):
        parts = [range(size) for size in shape]
        parts[dim] = chunk(parts[dim], pieces, index)
        found.append(tuple((part.start, part.stop) for part in parts))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_part_of_every_cut_has_the_bits_of_the_whole(
    dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initialization, "_FEW", 1000)
    parameters, config = whole_model()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for parameter, pieces in product(parameters, (2, 5, 8)):
            for dim in range(len(parameter.shape)):
                for span in spans(parameter.shape, pieces, dim):
                    part = part_of(parameter, span, dtype)
                    initialize_parameters([part], config, seed=0)
                    here = parameter.local[tuple(slice(*bounds) for bounds in span)]
                    assert torch.equal(part.local, here.to(dtype)), (parameter.name, span)
    finally:
        torch.set_num_threads(before)


def drawn_by(parts: list[Parameter], config: ModelConfig) -> int:
    """How many numbers are drawn to fill parts."""
    found = 0

    def count(name: str, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        nonlocal found
        if name.startswith("aten::normal_"):
            found += args[0].numel()

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with watch_operators(count):
            initialize_parameters(parts, config, seed=0)
    finally:
        torch.set_num_threads(before)
    return found


@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_of_eight_draws_an_eighth(dim: int) -> None:
    parameters, config = whole_model(dim=2048, dense_hidden=4096, num_dense_layers=1)
    large = [p for p in parameters if p.spec.kind == "matrix" and min(p.shape) >= 2048]
    assert large
    whole = sum(parameter.local.numel() for parameter in large)
    for index in range(8):
        parts = [part_of(p, spans(p.shape, 8, dim)[index], torch.float32) for p in large]
        assert drawn_by(parts, config) == whole / 8


def test_a_small_part_costs_no_more_than_the_tiles_it_touches() -> None:
    parameters, config = whole_model(dim=2048, dense_hidden=4096, num_dense_layers=1)
    (parameter,) = (p for p in parameters if p.name.endswith("wq.weight"))
    part = part_of(parameter, ((60, 70), (0, 2048)), torch.float32)
    assert drawn_by([part], config) == 2 * TILE[0] * 2048
    assert drawn_by([part_of(parameter, ((0, 0), (0, 2048)), torch.float32)], config) == 0


def test_every_tile_beats() -> None:
    parameters, config = whole_model()
    (parameter,) = (p for p in parameters if p.name == "embedding.weight")
    beats: list[None] = []
    initialize_parameters([parameter], config, seed=0, on_progress=lambda: beats.append(None))
    assert len(beats) == math.ceil(301 / TILE[0]) * math.ceil(288 / TILE[1])


def _deviation(values: Tensor) -> float:
    return float(values.double().pow(2).mean().sqrt())


def test_numbers_are_normal_with_the_deviation_of_the_config() -> None:
    parameters, config = whole_model(dim=1024, dense_hidden=2048, num_dense_layers=1)
    residual = config.init_std / math.sqrt(2 * config.num_layers)
    seen = 0
    for parameter in parameters:
        if parameter.spec.kind != "matrix" or parameter.local.numel() < 2**18:
            continue
        seen += 1
        values = parameter.local.detach()
        ends = parameter.name.endswith((".wo.weight", ".w2", ".w2.weight"))
        expected = residual if ends else config.init_std
        error = 6 / math.sqrt(values.numel())  # six deviations of an estimate
        assert abs(_deviation(values) / expected - 1) < error, parameter.name
        assert abs(float(values.double().mean())) < error * expected, parameter.name
        beyond = float((values.abs() > 2 * expected).double().mean())
        assert abs(beyond - 0.0455) < 0.005, parameter.name
    assert seen >= 5


def test_tiles_experts_names_and_seeds_have_streams_of_their_own() -> None:
    parameters, config = whole_model(dim=512)
    tiles: dict[tuple[Any, ...], Tensor] = {}
    for seed in (0, 1):
        initialize_parameters(parameters, config, seed=seed)
        for parameter in parameters:
            if parameter.spec.kind != "matrix":
                continue
            matrices = parameter.local if parameter.spec.is_expert else [parameter.local]
            for index, matrix in enumerate(matrices):
                places = product(range(0, matrix.shape[0], 64), range(0, matrix.shape[1], 256))
                for row, column in places:
                    key = (seed, parameter.name, index, row, column)
                    tiles[key] = matrix[row : row + 4, column : column + 4].clone()
    firsts = [tuple(tile.flatten().tolist()) for tile in tiles.values() if tile.numel() == 16]
    assert len(firsts) > 100
    scales = {tuple(value / _deviation(torch.tensor(t)) for value in t) for t in firsts}
    assert len({tuple(round(v, 4) for v in t) for t in scales}) == len(firsts)


def test_the_start_of_a_seed_is_what_it_was() -> None:
    """Another result here is another start of every run: say so in the changelog."""
    values = torch.empty(2, 3)
    [tile] = initialization._tiles((300, 300), ((65, 67), (257, 260)))
    initialization._draw(values, 0.02, (7, "layers.0.attention.wq.weight"), tile)
    expected = [
        [-0.020914729684591293, 0.01089385710656643, -0.003936592489480972],
        [-0.008587433025240898, -0.01779543049633503, -0.01595638319849968],
    ]
    torch.testing.assert_close(values, torch.tensor(expected), rtol=1e-4, atol=1e-7)
