"""`hp-verify` of ranks that are given the same in another form: equal, and faults found."""

import functools
import re
from pathlib import Path

import pytest

from hp_verify.comparing.explain import explain
from hp_verify.comparing.findings import Comparison
from integration_tests.jobs.kinds import losses, padded
from integration_tests.jobs.kinds.job import STEPS, by_name, train
from integration_tests.jobs.recorded import beside_one

PADDED = by_name(
    padded.padded_right,
    padded.padded_left,
    padded.masked_right,
    losses.cancelling,
    padded.with_more,
    padded.called_more,
    padded.called_apart,
)
_UNSUMMED = "no-sync", "gradient", "embed.weight", "a sum over them is missing"
FAULTS = {
    "padded_right": _UNSUMMED,
    "padded_left": _UNSUMMED,
    "masked_right": _UNSUMMED,
    "cancelling": ("loss", "loss", "", "outputs are equal and the loss is not"),
    "with_more": ("used", "loss", "", "gives its models 8 samples more than the reference"),
    "called_more": ("used", "forward", "norm", "calls norm 1 time more than the reference"),
    "called_apart": ("used", "loss", "", "calls norm and out apart from what the reference"),
}
"""Fault, phase and name of the first difference, words of the likely cause."""
LISTED = {
    "with_more": {r"0 of 8 samples are missing, 8 are .*, and all gradients are equal"},
    "called_more": {"the reference has not computed it"},
    "called_apart": {"of some calls: its samples could not be told apart", "no tokens"},
}
"""Notes about jobs that are equal."""


def compared(tmp_path: Path, kind: str, fault: str = "") -> Comparison:
    return beside_one(tmp_path, functools.partial(train, PADDED[kind]), fault, steps=2 * STEPS)


@pytest.mark.sample("padded_right")
@pytest.mark.parametrize("kind", PADDED)
def test_the_same_in_another_form_is_equal(tmp_path: Path, kind: str) -> None:
    result = compared(tmp_path, kind)
    assert not result.differences, explain(result)
    wanted = LISTED.get(kind, set())
    told = {*result.unaligned.values()}
    assert all(any(re.fullmatch(w, why) for w in wanted) for why in told), told
    assert {"first weight", "forward", "loss", "gradient", "weight"} <= result.largest.keys()


@pytest.mark.sample("padded_left")
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_under_another_form_is_named_as_what_it_is(tmp_path: Path, kind: str) -> None:
    fault, phase, name, likely = FAULTS[kind]
    result = compared(tmp_path, kind, fault)
    first = result.differences[0]
    assert (first.step, first.phase) == (1, phase), first
    assert re.fullmatch(name, first.name), first
    told = " ".join(explain(result))
    assert likely in told, told
    assert "other batches" not in told
