"""Recorded runs: parts put together, differences found, ties between experts excused."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hp_platform.testing import run_distributed
from hp_train.verify import compare_values
from hp_train.verify.compare_values import compare_runs
from hp_verify.comparing.ties import CHOICES, SCORES
from hp_verify.recording.values import Part, ValueRecorder, read_steps

Step = dict[str, dict[str, Tensor | Part]]


def record(directory: Path, *ranks: list[Step]) -> Path:
    """Let each rank record its steps; a tensor without dims is a scalar."""
    for rank, steps in enumerate(ranks):
        recorder = ValueRecorder(directory, rank=rank)
        for step in steps:
            for quantity, tensors in step.items():
                recorder.add(quantity, tensors)
            recorder.end_step()
    return directory


def gradients(**tensors: Tensor) -> list[Step]:
    return [{"gradient": dict(tensors)}]


def test_parts_of_several_ranks_make_the_whole(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(4, 3)
    ranks: list[list[Step]] = [
        [{"weight": {"w": Part(whole[2 * rank : 2 * rank + 2], (4, 3), (2 * rank, 0))}}]
        for rank in range(2)
    ]
    [step] = read_steps(record(tmp_path, *ranks))
    assert step.index == 1
    assert not step.flaws
    assert torch.equal(step.tensors["weight"]["w"], whole)


def test_a_part_must_be_inside_the_whole() -> None:
    with pytest.raises(ValueError, match=r"offset \(3, 0\) \+ local \(2, 3\) must be inside shape"):
        Part(torch.zeros(2, 3), (4, 3), (3, 0))


def test_values_that_no_rank_has_are_a_flaw(tmp_path: Path) -> None:
    [step] = read_steps(record(tmp_path, [{"weight": {"w": Part(torch.ones(1), (3,), (1,))}}]))
    assert step.flaws == ("weight w: 2 of 3 values are on no rank",)


def test_replicas_that_differ_in_one_bit_are_a_flaw(tmp_path: Path) -> None:
    one = torch.ones(2, dtype=torch.float64)
    other = torch.tensor([1.0, 1.0 + 2**-52], dtype=torch.float64)
    same, differing = (
        record(tmp_path / name, gradients(w=one), gradients(w=value))
        for name, value in (("a", one), ("b", other))
    )
    assert compare_runs(same, same).ok
    comparison = compare_runs(differing, same, bound=1.0)
    assert not comparison.ok
    assert "rank-00001 differs from a rank before it" in comparison.flaws[0]


def test_dtensors_are_recorded_by_the_parts_that_ranks_hold(tmp_path: Path) -> None:
    run_distributed(partial(_record_dtensors, tmp_path), world_size=2)
    [step] = read_steps(tmp_path)
    assert not step.flaws
    for name, tensor in step.tensors["weight"].items():
        assert torch.equal(tensor, torch.arange(15.0).view(5, 3)), name


def _record_dtensors(directory: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(15.0).view(5, 3)
    recorder = ValueRecorder(directory, rank=dist.get_rank())
    recorder.add(
        "weight",
        {
            "rows": distribute_tensor(whole, mesh, [Shard(0)]),
            "columns": distribute_tensor(whole, mesh, [Shard(1)]),
            "replicated": distribute_tensor(whole, mesh, [Replicate()]),
        },
    )
    recorder.end_step()


def test_equal_runs_are_bitwise_equal(tmp_path: Path) -> None:
    runs = [record(tmp_path / name, gradients(w=torch.randn(3).fill_(0.1))) for name in "ab"]
    comparison = compare_runs(*runs)
    assert comparison.ok
    assert comparison.bitwise
    assert str(comparison).endswith("bitwise equal over 1 steps, 3 numbers")


def test_the_first_difference_is_the_first_in_the_order_of_recording(tmp_path: Path) -> None:
    def steps(second: float) -> list[Step]:
        return [
            {"gradient": {"z": torch.ones(2), "a": torch.ones(2)}, "weight": {"z": torch.ones(2)}},
            {
                "gradient": {"z": torch.ones(2), "a": torch.tensor([1.0, second])},
                "weight": {"z": torch.full((2,), second * 5)},
            },
        ]

    expected, actual = (record(tmp_path / str(x), steps(x)) for x in (1.0, 1.25))
    comparison = compare_runs(actual, expected, bound=1e-3)
    assert not comparison.ok
    first = comparison.first
    assert first is not None
    assert (first.step, first.phase, first.name) == (2, "gradient", "a")
    assert first.error == pytest.approx(0.25)
    assert comparison.errors["weight"] == pytest.approx(0.25)
    assert "first difference: step 2, gradient a: 2.500e-01" in str(comparison)
    assert "NOT EQUAL within 0.001" in str(comparison)


def test_an_excess_within_rounding_of_the_largest_value_is_none(tmp_path: Path) -> None:
    big, tiny = torch.ones(2, dtype=torch.float64), torch.tensor([1e-17, 0], dtype=torch.float64)
    expected = record(tmp_path / "a", gradients(big=big, tiny=tiny))
    rounded = record(tmp_path / "b", gradients(big=big, tiny=-tiny))
    wrong = record(tmp_path / "c", gradients(big=big, tiny=tiny * 1e3))
    assert compare_runs(rounded, expected, bound=1e-12).ok
    assert not compare_runs(rounded, expected).ok
    assert not compare_runs(wrong, expected, bound=1e-12).ok


@pytest.mark.parametrize(
    ("mine", "theirs"), [(1 + 2j, 1 + 3j), (2**53, 2**53 + 1), (True, False)], ids=str
)
def test_numbers_of_any_kind_are_told_apart(mine: complex, theirs: complex, tmp_path: Path) -> None:
    one, other = gradients(w=torch.tensor([mine])), gradients(w=torch.tensor([theirs]))
    found = compare_runs(record(tmp_path / "a", one), record(tmp_path / "b", other))
    assert not found.bitwise
    assert not found.ok
    [step] = read_steps(record(tmp_path / "c", one, other))
    assert len(step.flaws) == 1


def test_tensors_that_differ_are_looked_at_as_often_as_there_are_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, looks = torch.randn(40, 3).unbind(), list[Tensor]()
    one = record(tmp_path / "a", gradients(**{f"w{i}": row for i, row in enumerate(rows)}))
    other = record(tmp_path / "b", gradients(**{f"w{i}": 2 * row for i, row in enumerate(rows)}))

    def look(tensor: Tensor) -> float:
        looks.append(tensor)
        return tensor.abs().max().item()

    monkeypatch.setattr(compare_values, "_largest", look)
    assert not compare_runs(one, other, bound=0.1, norms_of=()).ok
    assert len(looks) == 3 * len(rows)


def test_a_run_that_ends_early_is_not_equal(tmp_path: Path) -> None:
    long, short = gradients(w=torch.ones(1)) * 2, gradients(w=torch.ones(1))
    runs = [record(tmp_path / name, steps) for name, steps in (("long", long), ("short", short))]
    assert compare_runs(*runs).flaws == ("step 2 must be in both runs",)


def test_a_missing_parameter_and_nan_are_not_equal(tmp_path: Path) -> None:
    expected = record(tmp_path / "a", gradients(w=torch.ones(1), v=torch.ones(1)))
    missing = record(tmp_path / "b", gradients(w=torch.ones(1)))
    nan = record(tmp_path / "c", gradients(w=torch.ones(1), v=torch.tensor([math.nan])))
    assert not compare_runs(missing, expected, bound=1.0).ok
    assert not compare_runs(nan, expected, bound=1.0).ok


@pytest.mark.parametrize(("gap", "excused"), [(1e-7, True), (1e-3, False)], ids=["a tie", "no tie"])
def test_an_excess_is_excused_only_by_a_choice_among_equal_scores(
    gap: float, excused: bool, tmp_path: Path
) -> None:
    def steps(expert: int, gradient: float) -> list[Step]:
        scores = torch.tensor([[0.5, 0.3, 0.3 - gap, 0.0]], dtype=torch.float64)
        choice = torch.tensor([[0, expert]])
        return [
            {
                CHOICES: {"layers.1.moe": choice},
                SCORES: {"layers.1.moe": scores},
                "gradient": {"w": torch.tensor([gradient])},
            }
        ]

    expected = record(tmp_path / "a", steps(1, 1.0))
    actual = record(tmp_path / "b", steps(2, 2.0))
    comparison = compare_runs(actual, expected, bound=1e-5, tie=1e-6)
    assert comparison.flip is not None
    assert (comparison.flip.name, comparison.flip.tokens) == ("layers.1.moe", 1)
    assert comparison.flip.margin == pytest.approx(gap, rel=1e-6)
    assert comparison.ok is comparison.excused is excused
    assert not compare_runs(actual, expected, bound=1e-5).ok


def test_an_excess_before_the_choice_is_not_excused(tmp_path: Path) -> None:
    def steps(expert: int, gradient: float) -> list[Step]:
        scores = torch.tensor([[0.5, 0.5]])
        return [
            {"gradient": {"w": torch.tensor([gradient])}},
            {CHOICES: {"moe": torch.tensor([[expert]])}, SCORES: {"moe": scores}},
        ]

    runs = [record(tmp_path / str(e), steps(e, g)) for e, g in ((0, 1.0), (1, 2.0))]
    assert not compare_runs(*runs, bound=1e-5, tie=1e-6).ok


def test_a_recorder_keeps_only_what_is_wanted(tmp_path: Path) -> None:
    recorder = ValueRecorder(
        tmp_path, rank=0, quantities=frozenset({"gradient", "loss"}), tensor_steps=frozenset({2})
    )
    for _ in range(2):
        recorder.add_scalar("loss", 0.1)
        recorder.add_scalar("norm", 0.1)
        recorder.add("gradient", {"w": torch.ones(1)})
        recorder.add("weight", {"w": torch.ones(1)})
        recorder.end_step()
    assert [list(step.tensors) for step in read_steps(tmp_path)] == [["loss"], ["loss", "gradient"]]


def test_an_empty_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="must hold a recording"):
        list(read_steps(tmp_path))


def test_nan_in_both_runs_is_a_difference(tmp_path: Path) -> None:
    runs = [record(tmp_path / name, gradients(w=torch.full((3,), torch.nan))) for name in "ab"]
    comparison = compare_runs(*runs, bound=1e-3)
    assert not comparison.ok
    assert comparison.first is not None
    assert comparison.first.error == torch.inf


def test_a_quantity_that_one_run_lacks_is_a_difference(tmp_path: Path) -> None:
    both: Step = {"weight": {"w": torch.ones(3)}}
    more: Step = {**both, "moment": {"w": torch.ones(3)}}
    runs = [record(tmp_path / str(i), [step]) for i, step in enumerate((more, both))]
    for pair in (runs, runs[::-1]):
        comparison = compare_runs(*pair, bound=0.5)
        assert not comparison.ok
        assert "moment w: inf (missing in" in str(comparison.first)
        assert comparison.num_values == 3


def test_runs_without_a_number_are_not_equal(tmp_path: Path) -> None:
    runs = [record(tmp_path / name, [{}]) for name in "ab"]
    comparison = compare_runs(*runs)
    assert not comparison.ok
    assert comparison.flaws == ("the runs have no numbers in common",)


@pytest.mark.parametrize("limit", [torch.nan, torch.inf, -1e-3])
def test_a_bound_that_nothing_exceeds_is_refused(limit: float, tmp_path: Path) -> None:
    run = record(tmp_path / "a", gradients(w=torch.ones(3)))
    with pytest.raises(ValueError, match=r"bound \(.*\) must be finite and not negative"):
        compare_runs(run, run, bound=limit)
    with pytest.raises(ValueError, match=r"slack of weight \(.*\) must be finite"):
        compare_runs(run, run, slack={"weight": limit})


def test_some_tensors_are_kept_in_every_step(tmp_path: Path) -> None:
    recorder = ValueRecorder(tmp_path, rank=0, tensor_steps=frozenset({2}))
    for _ in range(2):
        recorder.add("tokens", {"": torch.ones(1)}, in_every_step=True)
        recorder.add("weight", {"w": torch.ones(1)})
        recorder.end_step()
    assert [list(step.tensors) for step in read_steps(tmp_path)] == [
        ["tokens"],
        ["tokens", "weight"],
    ]


def test_what_follows_from_no_choice_is_not_excused_by_one(tmp_path: Path) -> None:
    def steps(expert: int, rate: float) -> list[Step]:
        scores = torch.tensor([[0.5, 0.3, 0.3 - 1e-7, 0.0]], dtype=torch.float64)
        choice = torch.tensor([[0, expert]])
        made: Step = {CHOICES: {"moe": choice}, SCORES: {"moe": scores}}
        return [made | {"gradient": {"w": choice.double()}, "rate": {"": torch.tensor(rate)}}]

    mine, theirs = record(tmp_path / "a", steps(1, 0.1)), record(tmp_path / "b", steps(2, 0.2))
    assert compare_runs(mine, theirs, bound=1e-4, tie=1e-5).ok
    assert not compare_runs(mine, theirs, bound=1e-4, tie=1e-5, fixed=["rate"]).ok
