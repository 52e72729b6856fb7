"""The model of routing: exact sums, the Gini coefficient asked for, the same everywhere."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_base.errors import ConfigError
from hp_plan.costs.routing import Skew, busiest_load, gini, parse_skew, rows_per_rank
from hp_trainer.config import ModelConfig

MODEL = ModelConfig(num_experts=64, top_k=4)


@given(
    tokens=st.integers(0, 5000),
    skew=st.sampled_from(["uniform", "gini=0.1", "gini=0.5", "gini=0.9"]),
    ranks=st.sampled_from([1, 2, 8, 16, 64]),
)
def test_every_token_has_its_experts_and_none_twice(tokens: int, skew: str, ranks: int) -> None:
    slots = parse_skew(skew, MODEL).slots(
        "layers.0", num_tokens=tokens, top_k=4, num_experts=64, num_ranks=ranks
    )
    assert len(slots) == 64
    assert sum(slots) == 4 * tokens
    assert all(0 <= number <= tokens for number in slots)
    rows = rows_per_rank(slots, tokens, 4, ranks)
    parts = [slots[rank * 64 // ranks :][: 64 // ranks] for rank in range(ranks)]
    for row, part in zip(rows, parts, strict=True):
        assert max(part) <= row <= min(tokens, sum(part))
        assert row * min(4, len(part)) >= sum(part)


@pytest.mark.parametrize("wanted", [0.0, 0.1, 0.4, 0.8])
@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_the_coefficient_is_the_one_that_was_asked_for(wanted: float, ranks: int) -> None:
    skew = parse_skew(f"gini={wanted}", MODEL)
    slots = skew.slots("layers.0", num_tokens=8192, top_k=4, num_experts=64, num_ranks=ranks)
    assert gini(slots) == pytest.approx(wanted, abs=0.005)


def test_few_ranks_stand_for_all_under_a_skew() -> None:
    skew = parse_skew("gini=0.5", MODEL)
    slots = skew.slots("layers.0", num_tokens=8192, top_k=4, num_experts=64, num_ranks=32)
    assert len({slots[rank * 2 :][:2] for rank in range(32)}) <= 8


def test_a_file_gives_shares_by_layer(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    path.write_text(json.dumps({"layers.1": [3, 1, 0, 0], "layers": [1, 1, 1, 1]}))
    skew = parse_skew(str(path), ModelConfig(num_experts=4, top_k=1))
    sizes = {"num_tokens": 8, "top_k": 1, "num_experts": 4, "num_ranks": 2}
    assert skew.slots("layers.1", **sizes) == (6, 2, 0, 0)
    assert skew.slots("layers.0", **sizes) == (2, 2, 2, 2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("gini=x", "must be like gini=0.4"),
        ("gini=0.99", "below 0.938"),
        ("nowhere.json", "No such file"),
    ],
)
def test_what_is_no_skew_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_skew(text, MODEL)


@pytest.mark.parametrize("row", [[1, 2], [1, 1, 1, -1], [0, 0, 0, 0], [1, 1, 1, "x"], {}])
def test_a_file_with_other_numbers_is_refused(row: object, tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    path.write_text(json.dumps({"layers": row}))
    with pytest.raises(ConfigError, match="layers"):
        parse_skew(str(path), ModelConfig(num_experts=4, top_k=1))


def test_the_busiest_rank_has_a_load_of_all_layers() -> None:
    model = ModelConfig(num_layers=4, num_dense_layers=1, num_experts=4, top_k=2)
    even = Skew("uniform")
    assert [busiest_load(even, model, ranks) for ranks in (1, 2, 4)] == [1.0, 1.0, 1.0]
    uneven = Skew("given", shares={"layers.2": (3.0, 3.0, 1.0, 1.0)})
    # One of three layers with experts: a rank of two has 1.5 of the mean there.
    assert busiest_load(uneven, model, 2) == pytest.approx(1 + 0.5 / 3, rel=1e-3)
    assert busiest_load(uneven, model, 1) == 1.0
    halves = (busiest_load(Skew("g", gini=each), model, 2) for each in (0.1, 0.3))
    assert 1.0 < next(halves) < next(halves)
