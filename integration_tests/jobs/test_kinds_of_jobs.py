"""`hp-verify` of training loops of many kinds: equal where they are, and different where not."""

import functools
from pathlib import Path

import pytest

from hp_verify.comparing.compare import Comparison
from hp_verify.comparing.explain import explain
from hp_verify.recording import events as ev
from integration_tests.jobs.further_kinds_of_jobs import FURTHER
from integration_tests.jobs.kinds_of_jobs import OTHER, SOUND, STEPS, train
from integration_tests.jobs.more_kinds_of_jobs import MORE, short
from integration_tests.jobs.recorded import beside_one

ALL = {**SOUND, **OTHER, **MORE, "short": short, **{k: loop for k, (loop, _) in FURTHER.items()}}
LISTED = {
    "penalized": "ranks have different terms of it, or parts",  # a gradient within the loss
    "tied_rows": "shape (9, 10) is not (9, 20) of the reference",
    "sharpness": "samples of the reference with the same input have other values",
    "served": "no optimizer of torch updates weights",
    "learns_to_learn": "ranks have different terms of it, or parts",
    "tables": "shape (8,) is not (4,) of the reference",  # of the samples of all ranks
}
"""Why some outputs, and gradients of a rank that does not update, are listed."""


def compared(tmp_path: Path, kind: str, fault: str = "") -> Comparison:
    return beside_one(tmp_path, functools.partial(train, ALL[kind]), fault, steps=2 * STEPS)


@pytest.mark.sample("images", "two_models", "closure")
@pytest.mark.parametrize("kind", SOUND | MORE)
def test_what_computes_the_same_is_equal(tmp_path: Path, kind: str) -> None:
    result = compared(tmp_path, kind)
    assert not result.differences
    assert not result.unaligned
    outputs = set() if kind == "compiled" else {"forward"}
    assert {"first weight", *outputs, "loss", "gradient", "weight"} <= result.largest.keys()


@pytest.mark.sample("many_evaluations")
@pytest.mark.parametrize("kind", [k for k in SOUND | MORE if k != "doubled"])  # equal anyway
def test_a_model_that_is_not_reduced_is_found(tmp_path: Path, kind: str) -> None:
    result = compared(tmp_path, kind, "no-sync")
    first = result.differences[0]
    # The first model is updated after others; the second evaluation is of weights updated wrongly.
    step = {"two_models": 2, "critic": 3}.get(kind, 1)
    phase = "forward" if kind == "many_evaluations" else "gradient"
    assert (first.step, first.phase) == (step, phase)


@pytest.mark.sample("policies")
@pytest.mark.parametrize("kind", FURTHER)
def test_what_computes_the_same_otherwise_is_equal(tmp_path: Path, kind: str) -> None:
    result = compared(tmp_path, kind)
    assert not result.differences
    assert {*result.unaligned.values()} <= {LISTED.get(kind, "")}
    assert {"first weight", "loss", "gradient", "weight"} - result.largest.keys() <= {"loss"}
    assert ("loss" in result.largest) == (kind != "surgery")  # which calls autograd itself
    assert ("optimizer state row_var" in result.largest) == (kind == "factored")


@pytest.mark.sample("odd_last", "grown")
@pytest.mark.parametrize("kind", FURTHER)
def test_a_mistake_of_its_own_is_found_where_it_is(tmp_path: Path, kind: str) -> None:
    result = compared(tmp_path, kind, "wrong")
    first = result.differences[0]
    step, phase, name = FURTHER[kind][1]
    assert (first.step, first.phase) == (step, phase)
    assert name in first.name
    if kind == "odd_last":  # a loss that is halved, no mean that should be a sum
        assert first.origin == ev.BACKWARD
    if kind == "shaken":
        assert any("weights that were changed after" in line for line in explain(result))


def test_a_rank_that_ends_before_others_is_found(tmp_path: Path) -> None:
    first = compared(tmp_path, "short").differences[0]
    assert str(first).startswith("step 2, update: ")
    assert first.note == "rank 1 makes it no more, and others do"


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
