"""`hp-verify` of ranks that look other than their reference: the mistake is named, not the look."""

import functools
import re
from pathlib import Path

import pytest

from hp_verify.comparing.explain import explain
from hp_verify.comparing.findings import Comparison, Verdict
from integration_tests.jobs.kinds import beside
from integration_tests.jobs.kinds.job import STEPS, by_name, train
from integration_tests.jobs.recorded import beside_one

LOOPS = by_name(
    beside.padded_as_words,
    beside.ordered_otherwise,
    beside.blank_where_padded,
    beside.dropped_otherwise,
    beside.dropped_unsummed,
    beside.shifted_for_a_gru,
    beside.values_otherwise,
)
FAULTS = {
    "padded_as_words": ("gradient", r"query\.weight", "the backward of this parameter"),
    "ordered_otherwise": ("gradient", r".*", "2 times the reference's"),
    "blank_where_padded": ("gradient", r"mix\.weight", "the backward of this parameter"),
    "dropped_otherwise": ("gradient norm", "", "the norm itself"),
    "shifted_for_a_gru": ("forward", "mix", "what mix was given is equal"),
    "values_otherwise": ("input", "", "the jobs are given other batches"),
    "dropped_unsummed": ("gradient", r"norm\.weight", "a sum over them is missing"),
}
"""Phase and name of the first difference, words of the likely cause."""


def compared(tmp_path: Path, kind: str, fault: str = "") -> Comparison:
    return beside_one(tmp_path, functools.partial(train, LOOPS[kind]), fault, steps=2 * STEPS)


@pytest.mark.sample("padded_as_words")
@pytest.mark.parametrize("kind", [kind for kind in LOOPS if not kind.startswith("dropped")])
def test_what_looks_otherwise_and_is_right_is_equal(tmp_path: Path, kind: str) -> None:
    result = compared(tmp_path, kind)
    assert result.verdict == Verdict.EQUAL, [*map(str, result.differences), *explain(result)]


@pytest.mark.sample("padded_as_words", "dropped_otherwise")
@pytest.mark.parametrize("kind", FAULTS)
def test_a_mistake_beside_another_look_is_named_as_the_mistake(tmp_path: Path, kind: str) -> None:
    phase, name, likely = FAULTS[kind]
    result = compared(tmp_path, kind, "wrong")
    first = result.differences[0]
    assert (first.step, first.phase) == (1, phase), first
    assert re.fullmatch(name, first.name), first
    assert likely in " ".join(explain(result)), explain(result)
