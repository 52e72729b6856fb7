"""What `hp-verify -- JOB` makes of the same in another form: padding, terms, more calls."""

from collections.abc import Mapping, Sequence

import pytest
import torch

from hp_verify.comparing.compare import Floor, compare
from hp_verify.comparing.explain import explain
from hp_verify.comparing.findings import Comparison
from hp_verify.comparing.recordings import Digests, Recording, Step, sample_names
from hp_verify.recording.events import (
    BACKWARD,
    FORWARD,
    GRADIENT,
    INPUT,
    LOSS,
    REAL,
    WEIGHT,
    Rows,
)
from hp_verify.recording.samples import Samples

Sums = tuple[float, ...]
RIGHT: Sums = (1.0, -2.0, 0.5, 3.0)


def rows(*texts: str) -> torch.Tensor:
    return torch.tensor([[ord(letter) - ord("a") + 1 for letter in text] for text in texts])


def known_of(reference: Samples) -> dict[str, tuple[int, ...]]:
    """What a job learns of a reference's samples."""
    line = reference.rows(1, FORWARD)
    known = dict(zip(line.rows, line.tokens, strict=True))
    for name, tokens, (first, last) in zip(line.rows, line.tokens, line.real, strict=False):
        if (first, last) != (0, len(tokens)):
            known[REAL + name] = tokens[first:last]
    return known


def pieces(samples: Samples, tensor: torch.Tensor) -> dict[str, tuple[tuple[int, ...], Sums]]:
    """Sample -> shape, and sums of its values."""
    laid = samples.digest(tensor)
    assert laid is not None
    shape, digests = laid
    return {
        piece.row: (digest.shape or shape, piece.sums)
        for digest in digests
        for piece in digest.pieces()
    }


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (("abcz", "defg"), ("abczzz", "defgzz")),
        (("abzzz", "defgh"), ("abz",)),
        (("abzzz", "defgh"), ("ab",)),
        (("zzzab", "defgh"), ("zab",)),
        (("zzab", "defg"), ("zzzzab", "zzdefg")),
    ],
)
def test_a_sample_is_the_same_however_long_its_padding_is(
    theirs: tuple[str, ...], ours: tuple[str, ...]
) -> None:
    reference = Samples(rows(*theirs), 0, None)
    known = known_of(reference)

    samples = Samples(rows(*ours), 0, known)

    names = [name.removeprefix(REAL) for name in samples.names]
    assert names == list(reference.names[: len(ours)])
    values = dict(zip("abcdefghz", torch.randn(9, 5), strict=True))
    there, here = (
        torch.stack([torch.stack([values[letter] for letter in text]) for text in texts])
        for texts in (theirs, ours)
    )
    expected, found = pieces(reference, there), pieces(samples, here)
    for name, (shape, sums) in found.items():
        assert expected[name][0] == shape
        assert expected[name][1] == pytest.approx(sums, abs=1e-5)


def test_a_mask_says_what_is_padding_where_tokens_do_not() -> None:
    tokens, mask = rows("aba", "cde"), torch.tensor([[1, 1, 0], [1, 1, 1]])
    reference = Samples(tokens, 0, None, kwargs={"attention_mask": mask})
    known = known_of(reference)
    assert known[REAL + reference.names[0]] == (1, 2)

    samples = Samples(rows("abaaa"), 0, known, kwargs={"attention_mask": rows("aa```")})

    assert samples.names == (REAL + reference.names[0],)
    inverted = Samples(tokens, 0, None, kwargs={"key_padding_mask": mask == 0})
    assert inverted.rows(1, FORWARD).real == ((0, 2), (0, 3))


def test_a_mask_by_any_name_is_told_by_what_it_takes_away() -> None:
    tokens, mask = rows("abaa", "aaca", "abcd"), rows("aa``", "aaa`", "aaaa") > 0
    for given in ({"": (mask,)}, {"seen": mask.float()}, {"pad": ~mask}):
        reference = Samples(tokens, 0, None, kwargs=given)
        assert reference.rows(1, FORWARD).real == ((0, 2), (0, 3), (0, 4))
    kinds = rows("bbaa", "bbba", "bbbb") - 1  # of tokens, and nothing that is the same is left out
    other = Samples(rows("abcd", "efgh", "abcd"), 0, None, kwargs={"token_type_ids": kinds})
    assert other.rows(1, FORWARD).real == ()


def test_samples_end_to_end_in_a_row_are_found_each_by_itself() -> None:
    reference = Samples(rows("abcdko", "efghlp", "ijmnzz"), 0, None)
    samples = Samples(rows("efghlpijmn", "abcdkozzzz"), 0, known_of(reference))

    assert [name.removeprefix(REAL) for name in samples.rows(1, FORWARD).rows] == [
        reference.names[i] for i in (1, 0, 2)
    ]
    values = dict(zip("abcdefghijklmnopz", torch.randn(17, 5), strict=True))
    there, here = (
        torch.stack([torch.stack([values[letter] for letter in text]) for text in texts])
        for texts in (("abcdko", "efghlp", "ijmnzz"), ("efghlpijmn", "abcdkozzzz"))
    )
    expected, found = pieces(reference, there), pieces(samples, here)
    assert len(found) == 3
    for name, (shape, sums) in found.items():
        assert expected[name][0] == shape
        assert expected[name][1] == pytest.approx(sums, abs=1e-5)
    assert samples.digest(torch.randn(2, 3)) is None  # one number for two samples


def test_parts_of_samples_may_be_in_places_of_their_own() -> None:
    known = known_of(Samples(rows("abcdefmn", "ghijklop"), 0, None))
    samples = Samples(rows("abcd", "klop"), 0, known)
    assert set(samples.names) == set(known)
    assert {(run.start, run.length) for run in samples.runs} == {(0, 8), (4, 8)}
    assert not set(Samples(rows("abc", "lop"), 0, known).names) & set(known)


def test_other_samples_are_no_padded_ones() -> None:
    known = known_of(Samples(rows("abzz", "defg"), 0, None))
    samples = Samples(rows("abyz", "defg"), 0, known)
    assert not {*samples.names} <= known.keys()


def recording(
    losses: Sequence[float] = (3.0,),
    gradient: float = 1.0,
    given: Sequence[str] = ("x", "y"),
    outputs: Mapping[str, Sums] | None = None,
) -> Recording:
    """One step: outputs, a gradient, and the losses of processes."""
    step = Step(rows={*given})
    made = outputs or {"layer": RIGHT}
    step.tensors[FORWARD] = {n: Digests((4,), "float32", {"x": (s, 2.0)}) for n, s in made.items()}
    step.tensors[BACKWARD] = dict(step.tensors[FORWARD])
    sums = tuple(gradient * x for x in RIGHT)
    step.tensors[GRADIENT] = {"layer": Digests((4,), "float32", {"": (sums, 2.0)})}
    step.numbers[LOSS] = {"": {f"rank-{i:05d}": [loss] for i, loss in enumerate(losses)}}
    return Recording({1: step}, [{"rank": str(i)} for i in range(len(losses))])


def judged(actual: Recording, expected: Recording | None = None) -> Comparison:
    expected = expected or recording()
    return compare(actual, expected, Floor(expected, []))


def test_losses_that_cancel_are_as_near_as_their_terms_are() -> None:
    expected = recording([0.01])
    assert judged(recording([500.01, -499.9999]), expected).first is None
    first = judged(recording([500.51, -499.9999]), expected).first
    assert first is not None
    assert first.phase == LOSS
    assert judged(recording([0.0101, 0.0]), expected).first is not None


@pytest.mark.parametrize("times", [2.0, 0.5])
def test_a_loss_that_may_be_scaled_is_not_called_that(times: float) -> None:
    comparison = judged(recording([3.0 * times * (1 + 2.3e-5)]))
    first = comparison.first
    assert first is not None
    assert first.error == pytest.approx(2.3e-5, rel=1e-2)
    assert not any("of the reference's" in why or "times" in why for why in explain(comparison))


@pytest.mark.parametrize(("gradient", "is_named"), [(2.0, True), (2.0 + 6e-4, False)])
def test_a_factor_is_named_where_it_leaves_nothing_but_rounding(
    gradient: float, *, is_named: bool
) -> None:
    told = " ".join(explain(judged(recording(gradient=gradient))))
    assert ("2 times the reference's" in told) == is_named


def test_other_samples_are_listed_where_gradients_are_equal() -> None:
    comparison = judged(recording(given=("v", "w")))
    assert comparison.first is None
    told = "2 of 2 samples are missing, 2 are not the reference's, and all gradients are equal"
    assert comparison.unaligned["step 1, input"] == told
    other = recording(given=("v", "w"))
    other.steps[1].tensors[GRADIENT]["layer"].rows[""] = RIGHT[::-1], 2.0
    first = judged(other).first
    assert first is not None
    assert first.phase == INPUT


def test_other_samples_are_listed_where_gradients_are_a_multiple() -> None:
    comparison = judged(recording(given=("v", "w"), gradient=1.5))
    assert comparison.first is not None
    assert comparison.first.phase == GRADIENT
    told = "and 1 of 1 gradients are the reference's, or multiples of them"
    assert comparison.unaligned["step 1, input"].endswith(told)


def test_more_samples_are_told_beside_what_comes_of_them() -> None:
    comparison = judged(recording(given=("x", "y", "z"), gradient=1.5))
    assert comparison.first is not None
    assert comparison.first.phase == GRADIENT
    assert explain(comparison)[0] == "the job gives its models 1 sample more than the reference"


def test_a_module_that_is_called_more_often_is_compared_in_its_own_calls() -> None:
    other = tuple(-x for x in RIGHT)
    more = {"layer": other, "layer#1": RIGHT}
    comparison = judged(recording(outputs=more))
    assert comparison.first is None
    assert "forward layer#1" in comparison.unaligned
    wrong = judged(recording(outputs=more, gradient=1.5))
    assert wrong.first is not None
    assert wrong.first.phase == GRADIENT
    assert explain(wrong)[0] == "the job calls layer 1 time more than the reference"


def updated(gradient: Sums, weight: Sums, other: Sums = RIGHT) -> Recording:
    """One step: gradients of two parameters, and the first one's weights after it."""
    step = Step(rows={"x"})
    for phase, sums in ((GRADIENT, gradient), (WEIGHT, weight)):
        size = sum(x * x for x in sums) ** 0.5 / 2
        step.tensors[phase] = {"bias": Digests((4,), "float32", {"": (sums, size)})}
    step.tensors[GRADIENT]["layer"] = Digests((4,), "float32", {"": (other, 2.0)})
    return Recording({1: step}, [{"rank": "0"}])


def test_updates_that_rounding_decides_are_listed() -> None:
    tiny = tuple(1e-8 * x for x in RIGHT)
    still = (0.0,) * 4
    for there in (still, tuple(-x for x in tiny)):
        comparison = judged(updated(tiny, RIGHT), updated(there, tuple(-x for x in RIGHT)))
        assert comparison.first is None
        assert comparison.unaligned["weight bias"] == "its gradient is zero but for rounding"
    first = judged(updated(still, RIGHT), updated(still, still)).first  # decay, say
    assert first is not None
    assert first.phase == WEIGHT
    first = judged(updated(RIGHT, RIGHT), updated(still, RIGHT)).first
    assert first is not None
    assert first.phase == GRADIENT


def random(outputs: Mapping[str, Sums], drawing: str, gradient: Sums = RIGHT) -> Recording:
    made = recording(outputs=outputs)
    made.steps[1].tensors[GRADIENT]["layer"].rows[""] = gradient, 2.0
    made.steps[1].drawn, made.steps[1].drawing = {"torch"}, {drawing}
    made.steps[1].states = {"rank-00000": {"torch": "a"}, "rank-00001": {"torch": "a"}}
    return made


@pytest.mark.parametrize("drawing", ["drop", "first", ""])
def test_what_follows_from_random_numbers_is_listed_and_what_comes_before_is_not(
    drawing: str,
) -> None:
    other = tuple(-x for x in RIGHT)
    expected = random({"first": RIGHT, "drop": RIGHT, "last": RIGHT}, drawing)
    actual = random({"first": RIGHT, "drop": other, "last": other}, drawing, RIGHT[::-1])
    comparison = judged(actual, expected)
    assert (comparison.first is None) == bool(drawing)
    where = "step 1, forward drop, and all that follows"
    assert (where in comparison.unaligned) == bool(drawing)
    actual = random({"first": other, "drop": other, "last": other}, drawing, RIGHT[::-1])
    first = judged(actual, expected).first
    assert (first is None) == (drawing == "first")


def test_ranks_with_the_same_parameters_are_no_stages_of_each_other() -> None:
    first, later = (
        (f"rank-0000{rank}-1", Rows(1, 0, names)) for rank, names in enumerate([("x",), ("0.0",)])
    )
    held = {"rank-00000-1": {"w"}, "rank-00001-1": {"w"}}
    assert sample_names([first, later], held) == {
        ("rank-00001-1", 1, 0, "0.0"): "rank-00001-1 0 0"  # another input in the same call
    }
    again = (later[0], Rows(1, 1, ("1.0",)))
    assert sample_names([first, again], held) == {}
    held["rank-00001-1"] = {"v"}
    assert sample_names([first, later], held) == {("rank-00001-1", 1, 0, "0.0"): "x"}


@pytest.mark.parametrize("evidence", ["lost", "shapes", ""])
def test_outputs_of_other_rows_than_samples_are_listed_where_gradients_are_equal(
    evidence: str,
) -> None:
    for gradient in (1.0, 1.5):
        actual = recording(outputs={"layer": RIGHT[::-1]}, gradient=gradient)
        for phase in (FORWARD, BACKWARD):
            tensor = actual.steps[1].tensors[phase]["layer"]
            tensor.lost = "some" if evidence == "lost" else ""
            tensor.shapes = {"y": (3,)} if evidence == "shapes" else {}
        assert (judged(actual).first is None) == (bool(evidence) and gradient == 1.0)


@pytest.mark.parametrize(
    ("off", "shape", "others", "first"),
    [
        (0.0, (3,), 0.0, GRADIENT),
        (0.0, (4,), 0.0, GRADIENT),
        (5e-6, (3,), 0.0, GRADIENT),
        # Of another size it does not only lie otherwise: then samples must be of other lengths.
        (0.0, (3,), 0.5, GRADIENT),
        (5e-6, (3,), 0.5, FORWARD),
        (0.0, (4,), 0.5, FORWARD),
        (0.5, (3,), 0.0, FORWARD),
    ],
)
def test_what_lies_otherwise_comes_last_where_the_model_gives_the_same(
    off: float, shape: tuple[int, ...], others: float, first: str
) -> None:
    given = tuple(x * (1.0 + off) for x in RIGHT)
    actual = recording(outputs={"layer": RIGHT[::-1], "": given}, gradient=1.5)
    expected = recording(outputs={"layer": RIGHT, "": RIGHT})
    for one in (actual, expected):
        del one.steps[1].tensors[BACKWARD]
    actual.steps[1].tensors[FORWARD]["layer"].shapes = {"y": shape} if shape != (4,) else {}
    actual.steps[1].tensors[FORWARD]["layer"].others = others

    result = judged(actual, expected)

    assert result.first is not None
    assert (result.first.phase, result.first.name) == (first, "layer")
    assert (FORWARD, "layer") in {(d.phase, d.name) for d in result.differences}
