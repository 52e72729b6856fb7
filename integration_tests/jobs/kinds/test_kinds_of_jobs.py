"""`hp-verify` of training loops of many kinds: equal where they are, and different where not."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from hp_verify.comparing.explain import explain
from hp_verify.comparing.findings import Comparison
from hp_verify.recording import events as ev
from integration_tests.jobs.kinds import (
    again,
    batches,
    compiled,
    losses,
    models,
    optimizers,
    trained_parts,
    wrappers,
)
from integration_tests.jobs.kinds.job import STEPS, Job, by_name, train
from integration_tests.jobs.recorded import beside_one

EQUAL = by_name(
    models.images,
    losses.two_models,
    optimizers.closure,
    optimizers.many_evaluations,
    optimizers.two_optimizers,
    batches.accumulated,
    optimizers.scaled,
    optimizers.evaluated,
    trained_parts.frozen,
    batches.doubled,
    models.recurrent,
    compiled.compiled,
    again.sharded_again,
    optimizers.moving_average,
    trained_parts.low_rank,
    models.packed,
    batches.uneven,
    losses.critic,
    losses.distilled,
    losses.preferences,
    batches.loaded,
)
"""Loops that compute what one process does."""
MISTAKES: dict[Callable[[Job], None], tuple[int, str, str]] = {
    models.side_effects: (1, "gradient", ""),
    optimizers.in_backward: (1, "gradient", "norm.weight"),
    wrappers.scaled_by_hooks: (1, "gradient", "up.weight"),
    optimizers.averaged_in_place: (2, "evaluation", ""),
    losses.penalized: (1, "loss", ""),
    batches.odd_last: (3, "gradient", ""),
    batches.epochs: (3, "input", ""),
    trained_parts.thawed: (2, "gradient", "embed.weight"),
    again.blocks_again: (1, "gradient", "up.weight"),
    optimizers.sharpness: (1, "loss", ""),
    losses.surgery: (1, "gradient", ""),
    losses.policies: (1, "gradient", ""),
    trained_parts.grown: (2, "evaluation", "embed"),
    optimizers.looked_ahead: (3, "forward", ""),
    wrappers.tied_rows: (1, "gradient", "mix"),
    optimizers.orthogonal: (1, "weight", "up.weight"),
    optimizers.shared_state: (1, "weight", ""),
    losses.contrasted: (1, "backward", ""),
    wrappers.served: (1, "weight", "up.bias"),
    wrappers.sharded_accumulated: (1, "gradient", ""),
    losses.temperature: (3, "gradient", "parameter"),
    wrappers.tables: (1, "gradient", "tables.t"),
    models.graphs: (1, "loss", ""),
    losses.learns_to_learn: (1, "gradient", ""),
    models.settled: (1, "backward", "1"),
    losses.speech: (1, "loss", ""),
    losses.hardest: (2, "loss", ""),
    losses.taught_by_itself: (2, "loss", ""),
    optimizers.shaken: (2, "forward", "embed"),
    again.packed_away: (1, "backward", "out"),
    models.of_any_depth: (1, "forward", "out"),
    losses.denoised: (1, "input", ""),
    trained_parts.thawed_layers: (1, "gradient", "norm.bias"),
    optimizers.factored: (2, "weight", ""),
}
"""Loops with a mistake of their own; step, phase and part of the name where it is found."""
ALL = (
    EQUAL
    | by_name(*MISTAKES)
    | by_name(models.batch_norm, models.dropout, wrappers.pipelined, wrappers.short)
)
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
@pytest.mark.parametrize("kind", EQUAL)
def test_what_computes_the_same_is_equal(tmp_path: Path, kind: str) -> None:
    result = compared(tmp_path, kind)
    assert not result.differences
    assert not result.unaligned
    outputs = set() if kind == "compiled" else {"forward"}
    assert {"first weight", *outputs, "loss", "gradient", "weight"} <= result.largest.keys()


@pytest.mark.sample("many_evaluations")
@pytest.mark.parametrize("kind", [k for k in EQUAL if k != "doubled"])  # equal anyway
def test_a_model_that_is_not_reduced_is_found(tmp_path: Path, kind: str) -> None:
    result = compared(tmp_path, kind, "no-sync")
    first = result.differences[0]
    # The first model is updated after others; the second evaluation is of weights updated wrongly.
    step = {"two_models": 2, "critic": 3}.get(kind, 1)
    phase = "forward" if kind == "many_evaluations" else "gradient"
    assert (first.step, first.phase) == (step, phase)


@pytest.mark.sample("policies")
@pytest.mark.parametrize("kind", by_name(*MISTAKES))
def test_what_computes_the_same_otherwise_is_equal(tmp_path: Path, kind: str) -> None:
    result = compared(tmp_path, kind)
    assert not result.differences
    assert {*result.unaligned.values()} <= {LISTED.get(kind, "")}
    assert {"first weight", "loss", "gradient", "weight"} - result.largest.keys() <= {"loss"}
    assert ("loss" in result.largest) == (kind != "surgery")  # which calls autograd itself
    assert ("optimizer state row_var" in result.largest) == (kind == "factored")


@pytest.mark.sample("odd_last", "grown")
@pytest.mark.parametrize("kind", by_name(*MISTAKES))
def test_a_mistake_of_its_own_is_found_where_it_is(tmp_path: Path, kind: str) -> None:
    result = compared(tmp_path, kind, "wrong")
    first = result.differences[0]
    step, phase, name = MISTAKES[ALL[kind]]
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
def test_what_follows_from_random_numbers_of_own_samples_is_listed(tmp_path: Path) -> None:
    result = compared(tmp_path, "dropout")
    assert not result.differences
    why = result.unaligned["step 1, forward dropout, and all that follows"]
    assert why.startswith("dropout could explain it")
    assert result.largest.keys() == {"first weight", "learning rate"}


@pytest.mark.sample
def test_a_fault_beside_random_numbers_is_found(tmp_path: Path) -> None:
    first = compared(tmp_path, "dropout", "no-sync").differences[0]
    assert (first.step, first.phase) == (1, "gradient")
    assert first.who


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
