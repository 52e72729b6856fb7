"""`hp-verify` of training loops that do without what most have, and of what others do beside."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from hp_verify.comparing.explain import explain
from hp_verify.comparing.findings import REDUCTION, Comparison
from integration_tests.jobs.kinds import again, compiled, models, optimizers, wrappers
from integration_tests.jobs.kinds.job import STEPS, Job, by_name, train
from integration_tests.jobs.recorded import beside_one

ODD = by_name(
    again.whole_again,
    compiled.compiled_step,
    compiled.compiled_whole,
    compiled.compiled_later,
    compiled.compiled_update,
    models.tied_apart,
    models.method,
    models.tensors,
    optimizers.by_hand,
    optimizers.per_sample,
    optimizers.copies,
    optimizers.left_out,
    optimizers.left_out_by_norm,
    optimizers.made_state,
    optimizers.sparse,
    models.frequencies,
    models.lazy,
    models.masked,
    models.one_prompt,
    models.lengths,
)
"""Loops that compute what one process does without a called model, dense or real numbers, DDP."""
LISTED = {
    "compiled_whole": "the job has not computed it by this name",
    "tied_apart": "its samples could not be told apart",
    "method": "its samples could not be told apart",
    "by_hand": "no optimizer of torch updates weights",
    "masked": "not made of samples, or not told by which dim",
    "one_prompt": "samples of the reference with the same input have other values",
    "lengths": "rows have lengths of their own",
}
"""Why some outputs, and gradients of weights that no optimizer updates, are listed."""
UNSEEN = {"compiled_step", "compiled_whole", "tensors", "per_sample"}
"""Kinds whose outputs no hook sees."""


def compared(tmp_path: Path, loop: Callable[[Job], None], fault: str = "") -> Comparison:
    return beside_one(tmp_path, functools.partial(train, loop), fault, steps=2 * STEPS)


@pytest.mark.sample("left_out", "left_out_by_norm", "made_state")
@pytest.mark.parametrize("kind", ODD)
def test_what_computes_the_same_is_equal(tmp_path: Path, kind: str) -> None:
    result = compared(tmp_path, ODD[kind])
    assert not result.differences
    told = {why for name, why in result.unaligned.items() if "input" not in name}
    assert told <= {LISTED.get(kind, "")}
    assert ("forward" in result.largest) == (kind not in UNSEEN | {"lengths"})
    seen = (
        {"first weight", "weight"} if kind == "by_hand" else {"first weight", "gradient", "weight"}
    )
    assert seen <= result.largest.keys()


@pytest.mark.sample("sparse")
@pytest.mark.parametrize("kind", ODD)
def test_a_model_that_is_not_reduced_is_found(tmp_path: Path, kind: str) -> None:
    first = compared(tmp_path, ODD[kind], "no-sync").differences[0]
    assert first.step == 1
    assert first.phase == ("weight" if kind == "by_hand" else "gradient")
    assert first.who


@pytest.mark.sample
def test_a_rank_that_asks_alone_whether_gradients_are_finite_is_found(tmp_path: Path) -> None:
    result = compared(tmp_path, ODD["left_out"], "own-scale")
    first = result.differences[0]
    assert (first.step, first.phase) == (2, "update"), first
    assert first.note == "rank 1 makes it no more, and others do"


def test_a_rank_may_have_nothing_of_a_group_that_has_a_norm_of_its_own(tmp_path: Path) -> None:
    result = compared(tmp_path, optimizers.owned_groups)
    assert result.is_equal, result.differences
    assert {"gradient", "gradient norm", "clipped gradient"} <= result.largest.keys()


def test_gradients_that_are_rounded_on_their_way_are_told_as_that(tmp_path: Path) -> None:
    result = compared(tmp_path, wrappers.exchanged_narrow)
    first = result.differences[0]
    assert (first.step, first.phase, first.origin) == (1, "gradient", REDUCTION)
    assert any("rounding to bfloat16" in line for line in explain(result))
