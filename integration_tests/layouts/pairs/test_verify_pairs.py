"""Pairs of a feature of a model and a setting, in few configs beside one process each.

All pairs are in `nox -s verify`. Here are those of every feature and every axis of the mesh, in one
step of the smallest models that have them: those of a third of the configs, of all with HP_WHOLE.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from hp_train.verify.program import Program
from hp_trainer.config import Config
from hp_trainer.config.options import checked_config, resolve, with_keys
from integration_tests.layouts.pairs.covering import Design, Setting, changes, cover
from integration_tests.layouts.pairs.designed import Designed, fewest, read_rows

MODEL = Path(__file__).with_name("model.toml")
PROGRAM = Program(steps=1)
PARTS = 1 if os.environ.get("HP_WHOLE") == "1" else 3
AXES = [
    Setting(f"mesh.{axis}", 2)
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")
]
SMALL = {"model.num_layers": 3, "train.global_batch_size": 4}
FAULTY = "integration_tests.jobs.verify_faults:build"
BIAS, CUT = Setting("model.expert_bias", True), Setting("mesh.etp", 2)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i}+{i * i}"}) + "\n" for i in range(400)))
    keys = {**SMALL, "data.paths": [str(path)]}
    config = resolve(str(MODEL), keys.items(), env={}).config
    return PROGRAM.applied_to(checked_config(config, dtype="float64"))


@pytest.fixture(scope="module")
def design(base: Config) -> Design:
    return cover(base, num_processes=4, settings=AXES)


def designed(design: Design, folder: Path, *, job: str = "", results: str = "") -> Designed:
    scratch = folder / "runs"
    scratch.mkdir()
    made = Designed(design, PROGRAM, scratch, results=folder / results if results else None)
    return Designed(design, PROGRAM, scratch, job, made.results) if job else made


def test_every_pair_of_a_feature_and_an_axis_is_equal_to_one_process(
    design: Design, tmp_path: Path
) -> None:
    assert {axis for _, axis in design.pairs} == set(AXES)
    assert len({feature for feature, _ in design.pairs}) > 100
    assert set(design.refused) == {
        (Setting("model.num_experts", 0), each)
        for each in AXES
        if each.key in ("mesh.ep", "mesh.etp")
    }
    rows = [row for _, row in designed(design, tmp_path).rows(1, PARTS)]
    assert len(rows) == len(design.configs[::PARTS])
    for row in rows:
        assert row.ok, row


def with_fault(design: Design) -> Design:
    """Of the configs that have the pair, one, with the fault that no drawn layout has found."""
    where = design.pairs[BIAS, CUT]
    assert isinstance(where, int)
    name = {"run.name": "output_biases_are_summed_over_ranks_that_have_them_whole"}
    faulty = with_keys(design.configs[where], name)
    return Design(with_keys(design.base, name), (faulty,), {(BIAS, CUT): 0}, {})


def test_a_gradient_that_two_packages_sum_is_found(design: Design, tmp_path: Path) -> None:
    [faulty] = with_fault(design).configs
    verdicts = designed(with_fault(design), tmp_path, job=FAULTY).judge(faulty)
    [comparison] = [each.comparison for each in verdicts if not each.ok]
    assert comparison is not None
    assert comparison.first is not None
    assert (comparison.first.step, comparison.first.phase) == (1, "gradient")
    assert comparison.first.name.endswith("moe.experts.b2")


@pytest.mark.sample
def test_a_config_that_differs_is_cut_down_to_its_pair(design: Design, tmp_path: Path) -> None:
    runs = designed(with_fault(design), tmp_path, job=FAULTY, results="results.jsonl")
    [(_, row)] = runs.rows()
    assert not row.ok
    assert {str(BIAS), str(CUT)} <= set(row.named)
    assert len(row.named) <= 3  # ranks to cut over are the third
    [kept] = read_rows(runs.results).values()
    assert kept == row


def test_the_fewest_that_fail_are_left() -> None:
    asked = 0

    def fails(those: Sequence[Setting]) -> bool:
        nonlocal asked
        asked += 1
        return {3, 17} <= {each.value for each in those}

    left = fewest([Setting("a", n) for n in range(40)], fails)
    assert [each.value for each in left] == [3, 17]
    assert asked < 40


def test_what_is_known_to_be_equal_is_not_run_again(design: Design, tmp_path: Path) -> None:
    runs = designed(design, tmp_path, results="results.jsonl", job="nobody:nothing")
    assert runs.results is not None
    rows = [
        {
            "config": list(map(str, changes(config, design.base))),
            "ok": True,
            "results": [],
            "seconds": 1,
        }
        for config in design.configs
    ]
    runs.results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row.seconds for _, row in runs.rows(2, 3)] == [1] * len(design.configs[1::3])
