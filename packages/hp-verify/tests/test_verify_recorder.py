"""`hp-verify -- JOB --against -- REFERENCE`, in parts."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from hp_base.errors import ConfigError
from hp_platform.device import Lifting
from hp_platform.testing import run_distributed
from hp_verify.cli import main
from hp_verify.comparing.compare import Floor, compare
from hp_verify.comparing.explain import explain
from hp_verify.comparing.findings import REDUCTION, Comparison
from hp_verify.comparing.recordings import Digests, Recording, Step, distance, join
from hp_verify.jobs import split
from hp_verify.recording.begin import Disturbing
from hp_verify.recording.digests import digest_of
from hp_verify.recording.events import (
    BACKWARD,
    FORWARD,
    GRADIENT,
    LOSS,
    NORM,
    OWN,
    RATE,
    START,
    Event,
    Log,
)
from hp_verify.recording.names import Renaming, plain
from hp_verify.recording.samples import Samples, batch_of, hashes
from hp_verify.recording.slices import placed


def test_names_lose_what_wraps_a_module() -> None:
    assert plain("module._orig_mod.layers.0._fsdp_wrapped_module.wq.weight") == "layers.0.wq.weight"
    assert plain("module") == ""
    assert plain("layers.0._checkpoint_wrapped_module") == "layers.0"
    assert plain("my_module.weight") == "my_module.weight"


def test_modules_of_a_later_stage_are_called_as_in_the_whole() -> None:
    renaming = Renaming([("layers.0.wq.weight", "model.layers.2.wq.weight")])

    assert renaming("layers.0.norm.weight") == "model.layers.2.norm.weight"
    assert renaming("layers.0") == "model.layers.2"
    assert renaming("layers.1.norm") == "layers.1.norm"


def joined_of(folder: Path, *parts: tuple[torch.Tensor, int], may_add: bool = False) -> Digests:
    """A vector of four values of which ranks have written parts: values, and where they begin."""
    for rank, (values, begin) in enumerate(parts):
        log = Log(folder, f"{rank:05d}-1")
        log.add({"rank": str(rank), "ranks": str(len(parts))})
        pieces = digest_of(values, ((begin, begin + len(values)),)).pieces()
        log.add(Event(1, GRADIENT, "w", (4,), "float64", tuple(pieces), may_add=may_add))
        log.flush()
    return join(folder).steps[1].tensors[GRADIENT]["w"]


@pytest.mark.parametrize(("spans", "count"), [(((0, 3), (2, 4)), 5), (((0, 1), (2, 4)), 3)])
def test_parts_that_overlap_or_leave_something_out_are_not_laid(
    spans: tuple[tuple[int, int], ...], count: int, tmp_path: Path
) -> None:
    whole = torch.randn(4, dtype=torch.float64)
    found = joined_of(tmp_path, *((whole[a:b], a) for a, b in spans))
    assert found.problem == f"{count} of 4 values are on a rank, counted once each"


@pytest.mark.parametrize("is_copy", [True, False])
def test_terms_are_added_and_copies_are_not(tmp_path: Path, *, is_copy: bool) -> None:
    first = torch.randn(4, dtype=torch.float64)
    other = first.clone() if is_copy else torch.randn(4, dtype=torch.float64)
    found = joined_of(tmp_path, (first, 0), (other, 0), may_add=True)
    wanted = digest_of(first if is_copy else first + other, ((0, 4),)).pieces()[0]
    assert found.is_sum is not is_copy
    assert distance(found.rows[""][0], wanted.sums) <= 1e-12 * wanted.norm


@given(st.integers(1, 7), st.integers(2, 9), st.integers(1, 8))
def test_digests_of_parts_add_up_to_that_of_the_whole(rows: int, columns: int, cut: int) -> None:
    values = torch.randn(rows, columns, dtype=torch.float64)
    cut = min(cut, columns)
    whole = digest_of(values, ((0, rows), (0, columns))).pieces()[0]
    parts = [
        digest_of(values[:, a:b], ((0, rows), (a, b))).pieces()[0]
        for a, b in ((0, cut), (cut, columns))
    ]

    sums = [sum(part.sums[k] for part in parts) for k in range(len(whole.sums))]
    assert sums == pytest.approx(whole.sums, abs=1e-12)
    assert math.hypot(*(part.norm for part in parts)) == pytest.approx(whole.norm)


@pytest.mark.parametrize("shape", [(), (3,), (3, 2), (3, 2, 2)])
def test_a_digest_is_of_what_a_tensor_was_then(shape: tuple[int, ...]) -> None:
    values, box = torch.ones(shape), tuple((0, size) for size in shape)
    digest, then = digest_of(values, box), digest_of(torch.ones(shape), box).pieces()
    values.zero_()
    assert digest.pieces() == then


def test_the_distance_of_digests_is_that_of_the_tensors() -> None:
    generator = torch.Generator().manual_seed(0)
    ratios = []
    for _ in range(200):
        a, b = torch.randn(2, 16, 24, generator=generator, dtype=torch.float64)
        mine, theirs = (digest_of(x, ((0, 16), (0, 24))).pieces()[0] for x in (a, b))
        ratios.append((distance(mine.sums, theirs.sums) / float((a - b).norm())) ** 2)

    assert sum(ratios) / len(ratios) == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.int8], ids=str)
def test_digests_of_any_dtype_add_up_and_see_a_change(dtype: torch.dtype) -> None:
    values = (8 * torch.randn(6, 8)).to(dtype)
    values[3, 5] = 3  # a zero would not change
    changed = values.clone()
    changed[3, 5] = -changed[3, 5].to(torch.complex64 if dtype.is_complex else torch.float32)
    whole, other = (digest_of(x, ((0, 6), (0, 8))).pieces()[0] for x in (values, changed))
    parts = [digest_of(values[a:b], ((a, b), (0, 8))).pieces()[0] for a, b in ((0, 2), (2, 6))]

    sums = [sum(part.sums[k] for part in parts) for k in range(len(whole.sums))]
    assert sums == pytest.approx(whole.sums, abs=1e-4)
    assert distance(whole.sums, other.sums) > 0.1


def test_numbers_that_are_not_finite_are_equal_in_the_same_places_alone() -> None:
    values = torch.randn(6, 8)
    values[2, 3] = -math.inf
    finite, elsewhere = values.nan_to_num(neginf=0.0), values.roll(1, 0)
    one, zero, other = (
        digest_of(x, ((0, 6), (0, 8))).pieces()[0] for x in (values, finite, elsewhere)
    )

    assert one.norm == math.inf
    assert all(map(math.isfinite, one.sums))
    assert distance(one.sums, zero.sums) > 1.0
    assert distance(one.sums, other.sums) > 1.0


def test_the_tokens_are_what_tells_samples_apart() -> None:
    tokens, mask = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64)

    assert batch_of((), {"attention_mask": mask, "input_ids": tokens}) is tokens
    assert batch_of((tokens,), {"mask": mask}) is tokens
    assert batch_of((), {}) is None


def test_parts_of_a_sequence_are_laid_where_they_are_in_the_references() -> None:
    whole = torch.arange(8)[None] * 3
    known = {"sample": tuple(whole[0].tolist())}
    ends = whole[:, [0, 1, 6, 7]]  # the first and the last quarter, as head-tail layouts deal them

    samples = Samples(ends, 0, known)
    laid = samples.digest(torch.randn(1, 4, 5))

    assert laid is not None
    shape, digests = laid
    assert shape == (8, 5)
    assert [digest.box for digest in digests] == [((0, 2), (0, 5)), ((6, 8), (0, 5))]
    assert {row for digest in digests for row in digest.rows} == {"sample"}


@pytest.mark.parametrize(("ranks", "is_equal"), [(1, False), (2, True)])
def test_an_output_that_ranks_have_parts_of_is_listed_where_nothing_comes_of_it(
    ranks: int, is_equal: bool
) -> None:
    expected, actual = recording(), recording({FORWARD: 0.5})
    actual.facts = [{"rank": str(rank)} for rank in range(ranks)]

    comparison = compare(actual, expected, Floor(expected, []))

    assert (comparison.first is None) is is_equal
    told = comparison.unaligned.get("forward layer", "")
    assert ("1/2 of the reference's on every rank" in told) is is_equal


@pytest.mark.parametrize(
    ("of_model", "changes", "others", "is_equal"),
    [
        ({"": 1.0}, {}, 0.0, True),
        ({":logits": 1.0, "#1": 1.0}, {}, 0.0, True),
        ({"": 1.1}, {}, 0.0, False),
        ({"block": 1.0}, {}, 0.0, False),  # nothing says what the model gives
        ({"": None}, {}, 0.0, False),  # not compared
        ({"": 1.0}, {GRADIENT: 1.1}, 0.0, False),
        ({"": 1.0}, {LOSS: 1.1}, 0.0, False),
        ({"": 1.0}, {}, 0.5, False),  # of another size, which a norm behind it may hide
    ],
)
def test_an_output_that_lies_otherwise_is_listed_where_the_models_own_and_gradients_are_equal(
    of_model: Mapping[str, float | None],
    changes: Mapping[str, float],
    others: float,
    is_equal: bool,
) -> None:
    expected, actual = recording(), recording({FORWARD: 0.3, **changes})
    actual.steps[1].tensors[FORWARD]["layer"].others = others
    for name, times in of_model.items():
        expected.steps[1].tensors[FORWARD][name] = Digests((4,), "float32", {"sample": RIGHT})
        rows = {"sample": (tuple((times or 0.0) * x for x in RIGHT[0]), 2.0)}
        problem = "" if times else "not put together"
        mine = Digests((4,), "float32", rows, problem=problem)
        actual.steps[1].tensors[FORWARD][name] = mine

    comparison = compare(actual, expected, Floor(expected, []))

    assert comparison.is_equal is is_equal
    assert ("all gradients are equal" in comparison.unaligned.get("forward layer", "")) is is_equal


def test_an_output_that_is_a_part_stays_a_difference_where_a_gradient_differs() -> None:
    expected, actual = recording(), recording({FORWARD: 0.5, GRADIENT: 1.1})
    actual.facts = [{"rank": "0"}, {"rank": "1"}]

    comparison = compare(actual, expected, Floor(expected, []))

    assert comparison.first is not None
    assert comparison.first.phase == FORWARD


def strided_parts() -> list[tuple[int, int]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(24.0).view(8, 3)
    fused = torch.cat([part.chunk(size)[rank] for part in whole.chunk(2)])
    mesh = init_device_mesh("cpu", (size,))
    tensor = DTensor.from_local(fused, mesh, [_StridedShard(0, split_factor=2)])
    values, parts, shape = placed(tensor)
    assert shape == (8, 3)
    for part in parts:
        there = whole[tuple(slice(*span) for span in part.box)]
        assert torch.equal(values[tuple(slice(*span) for span in part.local)], there)
    return [part.box[0] for part in parts]


def test_parts_of_a_fused_matrix_are_where_a_strided_placement_has_them() -> None:
    found = run_distributed(strided_parts, world_size=2)

    assert found == [[(0, 2), (4, 6)], [(2, 4), (6, 8)]]


def test_a_lifted_model_computes_in_float64() -> None:
    with Lifting():
        model = nn.Linear(3, 3, dtype=torch.float32).to(torch.bfloat16)
        out = model(torch.ones(2, 3, dtype=torch.float16)).float()

    assert out.dtype == model.weight.dtype == torch.float64


def test_other_sums_differ_by_rounding_alone() -> None:
    a, b = torch.randn(16, 64), torch.randn(64, 16)
    with Disturbing(1):
        other = a @ b
        product = nn.functional.linear(a, b.T.contiguous(), torch.ones(16))

    assert not torch.equal(other, a @ b)
    torch.testing.assert_close(other, a @ b, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(product, a @ b + 1, rtol=1e-4, atol=1e-5)


RIGHT = (1.0, -2.0, 0.5, 3.0), 2.0


def recording(changes: Mapping[str, float] | None = None) -> Recording:
    """One step of one process: a tensor of each phase, and numbers."""
    changes = changes or {}
    step = Step()
    for phase in (FORWARD, BACKWARD, GRADIENT):
        sums: tuple[float, ...] = RIGHT[0]
        if phase in changes:
            sums = tuple(changes[phase] * x for x in sums)
        rows = {"" if phase == GRADIENT else "sample": (sums, 2.0)}
        step.tensors[phase] = {"layer": Digests((4,), "float32", rows)}
    for phase in (LOSS, NORM, RATE):
        step.numbers[phase] = {"": {"rank-00000": [3.0 * changes.get(phase, 1.0)]}}
    return Recording({1: step}, [{"rank": "0"}])


def judged(changes: Mapping[str, float] | None = None) -> Comparison:
    expected = recording()
    return compare(recording(changes), expected, Floor(expected, [recording()]))


def test_equal_recordings_are_equal() -> None:
    assert judged().first is None


@pytest.mark.parametrize("factor", [2.0, 0.5, 64.0], ids=str)
def test_a_loss_may_be_scaled_by_ranks_or_microbatches(factor: float) -> None:
    assert judged({LOSS: factor, BACKWARD: factor}).first is None


@pytest.mark.parametrize(
    ("change", "phase", "said"),
    [
        ({FORWARD: 1.01}, FORWARD, "what it gives is not"),
        ({LOSS: 1.01}, LOSS, "its mean"),
        ({GRADIENT: 2.0}, GRADIENT, "2 times"),
        ({GRADIENT: 0.25}, GRADIENT, "1/4 of"),
        ({GRADIENT: 0.0}, GRADIENT, "lost"),
        ({GRADIENT: math.nan}, GRADIENT, "not finite"),
        ({NORM: 1.1}, NORM, "counted twice"),
        ({NORM: math.nan}, NORM, ""),
        ({RATE: 1.1}, RATE, "its schedule"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_first_difference_is_named(change: dict[str, float], phase: str, said: str) -> None:
    comparison = judged(change)

    assert comparison.first is not None
    assert comparison.first.phase == phase
    assert said in " ".join(explain(comparison))


def test_a_loss_is_not_blamed_where_no_output_was_compared() -> None:
    expected, actual = recording(), recording({LOSS: 1.01})
    for made in (expected, actual):
        del made.steps[1].tensors[FORWARD]

    comparison = compare(actual, expected, Floor(expected, [recording()]))

    assert explain(comparison) == ["the forward or the loss: outputs were not compared"]


@pytest.mark.parametrize("side", ["job", "reference"])
def test_a_gradient_that_only_one_of_both_has_is_a_difference(side: str) -> None:
    both = {"job": recording(), "reference": recording()}
    for made in both.values():
        step = made.steps[1]
        step.tensors[START] = dict.fromkeys(("layer", "norm"), step.tensors[GRADIENT]["layer"])
    more = both[side].steps[1].tensors[GRADIENT]
    more["norm"] = more["layer"]

    comparison = compare(both["job"], both["reference"], Floor(both["reference"], []))

    assert comparison.first is not None
    assert (comparison.first.phase, comparison.first.name) == (GRADIENT, "norm")
    assert ("lost" if side == "reference" else "zeros") in explain(comparison)[0]


def test_norms_of_a_step_are_each_compared_with_its_own() -> None:
    expected, actual = recording(), recording()
    for made, values in ((expected, [0.5, 3.0]), (actual, [0.5, 3.0])):
        made.steps[1].numbers[NORM] = {"": {"rank-00000": values}}
    assert compare(actual, expected, Floor(expected, [])).first is None

    actual.steps[1].numbers[NORM] = {"": {"rank-00000": [3.0, 0.5]}}

    first = compare(actual, expected, Floor(expected, [])).first
    assert first is not None
    assert first.phase == NORM


@pytest.mark.parametrize(
    ("norms", "is_equal"),
    [
        ([[3.0], [3.0, 0.5]], True),  # rank 0 has nothing of the second group
        ([[3.0, 0.5, 3.0, 0.5], [3.0, 3.0]], True),  # two optimizers, which clip in turn
        ([[3.0], [3.0, 0.6]], False),
        ([[2.5], [3.0, 0.5]], False),
        ([[3.0], [3.0]], False),
        ([[3.0], [3.0, math.nan]], False),
    ],
)
def test_ranks_may_have_norms_of_some_groups_alone(
    norms: list[list[float]], *, is_equal: bool
) -> None:
    expected, actual = recording(), recording()
    expected.steps[1].numbers[NORM] = {"": {"rank-00000": [3.0, 0.5]}}
    actual.steps[1].numbers[NORM] = {"": {f"rank-{i:05d}": some for i, some in enumerate(norms)}}

    first = compare(actual, expected, Floor(expected, [])).first

    assert (first is None) == is_equal
    assert first is None or first.phase == NORM


def test_gradients_and_losses_that_overflow_on_both_sides_are_equal() -> None:
    changes = {GRADIENT: math.inf, LOSS: math.inf, NORM: math.inf}
    expected, actual = recording(changes), recording(changes)
    for made, norm in ((expected, math.inf), (actual, math.nan)):
        made.steps[1].tensors[GRADIENT]["layer"].rows[""] = (1.0, 2.0, 3.0, 4.0), norm

    assert compare(actual, expected, Floor(expected, [])).first is None


def test_a_loss_is_as_exact_as_its_dtype() -> None:
    expected, actual = recording(), recording({LOSS: 1.003})
    assert compare(actual, expected, Floor(expected, [])).first is not None

    actual.steps[1].dtypes[LOSS] = {"bfloat16"}

    assert compare(actual, expected, Floor(expected, [])).first is None


def test_a_loss_that_is_zero_but_for_rounding_has_no_digits() -> None:
    expected, actual = recording(), recording()
    for made, values in ((expected, [-2e-8]), (actual, [0.18, -0.18 - 4e-8])):
        made.steps[1].numbers[LOSS] = {"": {f"rank-{i:05d}": [x] for i, x in enumerate(values)}}
    floor = Floor(expected, [])
    assert compare(actual, expected, floor).first is None

    actual.steps[1].numbers[LOSS] = {"": {"rank-00000": [0.01]}}

    first = compare(actual, expected, floor).first
    assert first is not None
    assert first.phase == LOSS


@pytest.mark.parametrize("is_new", [True, False])
def test_a_loss_that_is_halved_at_a_later_step_is_no_reduction(*, is_new: bool) -> None:
    # Ranks average what adds up to twice the reference's; then it adds up to the reference's.
    expected, actual = (recording_of_own([1.0, 1.0]), recording_of_own([2.0, 1.0]))
    actual.steps[2].tensors[GRADIENT] = recording({GRADIENT: 0.5}).steps[1].tensors[GRADIENT]
    if not is_new:
        actual.steps[1].tensors[OWN] = expected.steps[1].tensors[OWN]

    first = compare(actual, expected, Floor(expected, [])).first

    assert first is not None
    assert (first.step, first.origin) == (2, BACKWARD if is_new else REDUCTION)


def recording_of_own(factors: Sequence[float]) -> Recording:
    """Steps of one process, whose ranks' own gradients are multiples."""
    steps = {}
    for index, factor in enumerate(factors, 1):
        steps[index] = recording().steps[1]
        steps[index].tensors[OWN] = recording({GRADIENT: factor}).steps[1].tensors[GRADIENT]
    return Recording(steps, [{"rank": "0"}])


def test_samples_with_one_name_and_other_values_are_listed() -> None:
    expected, actual = recording(), recording({FORWARD: 3.0})
    expected.steps[1].tensors[FORWARD]["layer"].disagree = 1.0

    comparison = compare(actual, expected, Floor(expected, []))

    assert comparison.first is None
    assert "the same input have other values" in comparison.unaligned["forward layer"]


def test_a_part_of_an_output_is_a_difference_where_no_gradient_was_compared() -> None:
    expected, actual = recording(), recording({FORWARD: 0.5})
    actual = Recording(actual.steps, [{"rank": "0"}, {"rank": "1"}])
    floor = Floor(expected, [])
    assert compare(actual, expected, floor).first is None  # all gradients are equal

    actual.steps[1].tensors[GRADIENT]["layer"].problem = "not found"

    first = compare(actual, expected, floor).first
    assert first is not None
    assert first.phase == FORWARD


@pytest.mark.parametrize(("phase", "theirs"), [(RATE, 0.0), (LOSS, math.nan), (LOSS, math.inf)])
def test_a_number_of_the_reference_may_be_zero_or_not_finite(phase: str, theirs: float) -> None:
    expected, actual = recording(), recording()
    for made, value in ((expected, theirs), (actual, 1e-3)):
        made.steps[1].numbers[phase] = {"": {"rank-00000": [value]}}

    comparison = compare(actual, expected, Floor(expected, [recording()]))

    assert comparison.first is not None
    assert comparison.first.phase == phase
    explain(comparison)  # of a ratio that is none


def test_names_of_rows_are_of_all_their_bits_and_those_of_samples_of_some() -> None:
    wide = torch.zeros(2, 1 << 17)
    wide[1, 1] = 1.0
    assert len(set(hashes(wide))) == 2
    assert len(set(Samples(wide + 1.0, 0, None).names)) == 1
    assert len(set(Samples(torch.eye(2, 1 << 14), 0, None).names)) == 2


def test_what_cannot_be_compared_is_listed() -> None:
    expected, actual = recording(), recording()
    actual.steps[1].tensors[FORWARD]["layer"].problem = "ranks have parts"
    actual.steps[1].tensors[GRADIENT]["other"] = actual.steps[1].tensors[GRADIENT].pop("layer")

    comparison = compare(actual, expected, Floor(expected, []))

    assert comparison.unaligned == {
        "forward layer": "ranks have parts",
        "gradient layer": "the job has not computed it by this name",
        "gradient other": "the reference has not computed it",
    }


def test_the_command_line_is_parted_at_its_marks() -> None:
    line = [
        "--steps",
        "2",
        "--",
        "torchrun",
        "job.py",
        "--against",
        "x",
        "--against",
        "--",
        "python",
    ]

    assert split(line) == (["--steps", "2"], ["torchrun", "job.py", "--against", "x"], ["python"])


def test_a_wrong_flag_is_answered_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--stepz", "3", "--", "a", "--against", "--", "b"]) == 2
    assert capsys.readouterr().err == (
        "error: unrecognized arguments: --stepz 3 (see hp-verify --help)\n"
    )
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "REFERENCE" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line", [["--", "a"], ["--", "--against", "--", "b"], ["--", "a", "--against", "--"]]
)
def test_half_a_command_line_is_refused(line: list[str]) -> None:
    with pytest.raises(ConfigError):
        split(line)


def test_a_tensor_of_which_two_dims_may_be_samples_is_not_laid() -> None:
    samples = Samples(torch.arange(24).view(4, 6), 0, None)
    assert samples.laid(torch.zeros(4, 4, 3)) is None
    for shape in ((4, 6, 3), (6, 4, 3), (4, 4)):
        assert samples.laid(torch.zeros(shape)) is not None
    square = Samples(torch.arange(4).view(2, 2), 0, None)
    assert square.laid(torch.zeros(2, 2, 5)) is not None  # tokens follow samples


def test_a_gradient_that_is_zero_but_for_rounding_has_no_error() -> None:
    recordings = [recording(), recording(), recording()]
    for sign, made in zip((1.0, -1.0, 1.0), recordings, strict=True):
        sums = (sign * 1e-9, 0.0, 0.0, 0.0)
        made.steps[1].tensors[GRADIENT]["bias"] = Digests((4,), "float32", {"": (sums, 1e-9)})
    actual, expected, other = recordings

    comparison = compare(actual, expected, Floor(expected, [other]))

    assert comparison.first is None
    assert comparison.largest[GRADIENT] == 0.0
