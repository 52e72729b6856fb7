"""`hp verify` of training loops of many kinds: equal where they are, and different where not."""

import functools
from pathlib import Path

import pytest

from hp_train.jobs.compare import Comparison, compare, with_floor
from hp_train.jobs.explain import explain
from hp_train.jobs.joined import Recording
from hp_train.jobs.request import Request
from integration_tests.kinds_of_jobs import SOUND, STEPS, train
from integration_tests.recorded import record


def compared(tmp_path: Path, kind: str, fault: str = "") -> Comparison:
    theirs = str(tmp_path / "reference")

    def referred(name: str, seed: int) -> Recording:
        known = theirs if seed else ""
        asked = Request(str(tmp_path / name), reference=known, steps=2 * STEPS, disturb=seed)
        return record(asked, functools.partial(train, kind), ranks=1)

    reference, floor = with_floor(referred)
    request = Request(str(tmp_path / "job"), reference=theirs, steps=2 * STEPS)
    job = record(request, functools.partial(train, kind, fault), ranks=2)
    return compare(job, reference, floor)


@pytest.mark.sample("images", "two_models", "closure")
@pytest.mark.parametrize("kind", SOUND)
def test_what_computes_the_same_is_equal(tmp_path: Path, kind: str) -> None:
    result = compared(tmp_path, kind)
    assert not result.differences
    assert not result.unaligned
    assert {"first weight", "forward", "loss", "gradient", "weight"} <= result.largest.keys()


@pytest.mark.sample("many_evaluations")
@pytest.mark.parametrize("kind", [kind for kind in SOUND if kind != "doubled"])  # equal anyway
def test_a_model_that_is_not_reduced_is_found(tmp_path: Path, kind: str) -> None:
    result = compared(tmp_path, kind, "no-sync")
    first = result.differences[0]
    # The first model's update is the second; the second evaluation is of weights updated wrongly.
    step = 2 if kind == "two_models" else 1
    phase = "forward" if kind == "many_evaluations" else "gradient"
    assert (first.step, first.phase) == (step, phase)


def test_statistics_of_own_samples_are_found(tmp_path: Path) -> None:
    first = compared(tmp_path, "batch_norm").differences[0]
    assert (first.step, first.phase, first.name) == (1, "forward", "1")


@pytest.mark.sample
def test_random_numbers_of_own_samples_are_found_and_told(tmp_path: Path) -> None:
    result = compared(tmp_path, "dropout")
    first = result.differences[0]
    assert (first.step, first.phase, first.name) == (1, "forward", "dropout")
    assert any("dropout could explain it" in line for line in explain(result))


@pytest.mark.sample
def test_calls_of_pipelining_for_shapes_alone_are_not_of_the_job(tmp_path: Path) -> None:
    result = compared(tmp_path, "pipelined")
    assert not result.differences
    assert {"first weight", "forward", "loss", "gradient", "weight"} <= result.largest.keys()
    # What a stage gives is not what the model gives.
    assert {item.partition(":")[0] for item in result.unaligned} == {"forward ", "backward "}


@pytest.mark.sample
def test_a_sum_over_microbatches_of_pipelining_is_found(tmp_path: Path) -> None:
    first = compared(tmp_path, "pipelined", "sum").differences[0]
    assert (first.step, first.phase) == (1, "gradient")
