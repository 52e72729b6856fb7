"""With Muon every layout of a run moves its weights as one process does."""

from pathlib import Path
from typing import Any

import pytest

from hp_optim import Muon
from hp_platform.testing import compare
from integration_tests.runs import Result, config_of, train_in

MUON: dict[str, Any] = {"train": {"dtype": "float64", "optimizer": "muon", "steps": 3}}
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "fsdp2": {"mesh": {"dp_shard": 2}},
    "tp2": {"mesh": {"tp": 2}},
    "ep2": {"mesh": {"dp_replicate": 2, "ep": 2}},
    "dp2": {"mesh": {"dp_replicate": 2}},
    "pp2": {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
    "hsdp-ep4": {"mesh": {"dp_replicate": 2, "dp_shard": 2, "ep": 4}},
    "tp2-fsdp2-ep2": {"mesh": {"tp": 2, "dp_shard": 2, "ep": 2}},
    "tp2-etp2-fsdp2-ep2": {"mesh": {"tp": 2, "dp_shard": 2, "ep": 2, "etp": 2}},
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train_in(config_of({}, **MUON), tmp_path_factory.mktemp("one"))


def test_matrices_but_tables_are_those_of_muon(one_process: Result) -> None:
    names = {n.partition(".")[2] for n in one_process.moments if n.startswith("momentum_buffer")}
    assert {"layers.0.attention.wq.weight", "layers.1.moe.experts.w2"} <= names
    assert not names & {"embedding.weight", "output.weight", "norm.weight"}
    assert one_process.losses[-1] < one_process.losses[0]
    assert not any(name.startswith("exp_avg.layers.0.attention.w") for name in one_process.moments)


@pytest.mark.sample("fsdp2", "tp2", "ep2", "tp2-fsdp2-ep2")
@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_and_momenta_equal_one_process_in_fp64(
    name: str, one_process: Result, tmp_path: Path
) -> None:
    result = train_in(config_of(LAYOUTS[name], **MUON), tmp_path)
    assert result.losses == pytest.approx(one_process.losses, rel=1e-12)
    for mine, expected in (
        (result.parameters, one_process.parameters),
        (result.moments, one_process.moments),
    ):
        comparison = compare(mine, expected, bound=1e-12)
        assert comparison.ok, comparison


def test_a_run_with_muon_goes_on_under_another_layout(one_process: Result, tmp_path: Path) -> None:
    before = train_in(config_of(LAYOUTS["fsdp2"], **MUON), tmp_path, until=2)
    after = train_in(config_of(LAYOUTS["tp2"], **MUON), tmp_path)
    assert [*before.losses, *after.losses] == pytest.approx(one_process.losses, rel=1e-12)
    comparison = compare(after.parameters, one_process.parameters, bound=1e-12)
    assert comparison.ok, comparison


def test_a_matrix_per_shard_would_be_found(one_process: Result, tmp_path: Path) -> None:
    result = train_in(
        config_of(LAYOUTS["fsdp2"], **MUON), tmp_path, prepare_rank=orthogonalize_shards
    )
    assert not compare(result.parameters, one_process.parameters, bound=1e-4).ok


def orthogonalize_shards() -> None:
    """Let Muon know no layouts, so that each rank takes its part for a matrix."""
    inner = Muon.__init__

    def without_layouts(self: Muon, *args: Any, **options: Any) -> None:
        inner(self, *args, **options | {"layouts": None})

    Muon.__init__ = without_layouts  # type: ignore[method-assign]
