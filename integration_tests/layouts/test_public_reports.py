"""Public reports of other trainers, tried on this one: each computes what one process does."""

from pathlib import Path
from typing import Any

import pytest

from integration_tests.runs import Result, config_of, train_in

Tables = dict[str, dict[str, Any]]
_PLANNED: Tables = {
    "data": {"packing": "planned", "seq_len": 48},
    "train": {"microbatch_size": 1, "global_batch_size": 2},
}
_TWO: Tables = {"train": {"microbatch_size": 2}}
_FOUR: Tables = {"train": {"microbatch_size": 4, "global_batch_size": 4}}
_SINGLE: Tables = {"train": {"microbatch_size": 1, "global_batch_size": 4}}
CASES: dict[str, tuple[Tables, Tables]] = {
    # Automodel #3530: lengths that change inside of a step lost what was accumulated.
    "lengths": ({**_PLANNED, "mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}, _PLANNED),
    # torchtitan #3604: with sequence parallelism rows came back to other places beyond one sample.
    "places": ({**_TWO, "mesh": {"tp": 2, "ep": 2}}, _TWO),
    # Megatron #5798: experts were balanced by microbatch, and not by sequence.
    "balance": (_FOUR, _SINGLE),
}


def trained(tables: Tables, directory: Path) -> Result:
    more: Tables = {
        "train": {"dtype": "float64", "steps": 2},
        "model": {"balance_coefficient": 0.1},
    }
    names = {*tables, *more}
    return train_in(
        config_of({name: {**more.get(name, {}), **tables.get(name, {})} for name in names}),
        directory,
    )


@pytest.mark.sample("balance")
@pytest.mark.parametrize("case", CASES)
def test_what_was_reported_of_others_is_right_here(case: str, tmp_path: Path) -> None:
    layout, plain = CASES[case]

    found, expected = trained(layout, tmp_path / "layout"), trained(plain, tmp_path / "plain")

    require_equal(found, expected)
    assert found.balances == pytest.approx(expected.balances, rel=1e-12)
    assert min(expected.balances) > 0


def require_equal(found: Result, expected: Result) -> None:
    for kind in ("first_gradients", "parameters"):
        ours, theirs = getattr(found, kind), getattr(expected, kind)
        for name, tensor in theirs.items():
            assert (ours[name] - tensor).norm() <= 1e-12 * tensor.norm() + 1e-30, (kind, name)
    assert found.norms == pytest.approx(expected.norms, rel=1e-12)
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
