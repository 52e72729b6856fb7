"""Schedules as CSV and JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from hp_schedule import (
    MetaStep,
    Schedule,
    add_send_recv,
    forward_only,
    from_csv,
    from_json,
    gpipe,
    interleaved_1f1b,
    load,
    one_f_one_b,
    to_csv,
    to_json,
)

_OVERLAP = Schedule.from_steps(
    [
        [
            MetaStep.from_str(text)
            for text in ("0UNSHARD", "0F0", "(0F1;0B0)OVERLAP_F_B", "0I1", "0W1", "0RESHARD")
        ],
        [None, MetaStep.from_str("1F0"), None],
    ],
    stage_to_rank=[0, 1],
    num_microbatches=2,
    chains=[[0], [1]],
)
_SCHEDULES = [
    gpipe(1, num_microbatches=1),
    one_f_one_b(3, num_microbatches=5),
    add_send_recv(interleaved_1f1b(4, num_microbatches=6, num_stages_per_rank=3)),
    add_send_recv(forward_only(2, num_microbatches=2)),
]


@pytest.mark.parametrize("schedule", [*_SCHEDULES, _OVERLAP])
def test_json_reads_back_as_the_same_schedule(schedule: Schedule) -> None:
    assert from_json(to_json(schedule)) == schedule


@pytest.mark.parametrize("schedule", _SCHEDULES)
def test_csv_reads_back_as_the_same_schedule(schedule: Schedule) -> None:
    assert from_csv(to_csv(schedule)) == schedule


def test_csv_is_that_of_torch() -> None:
    text = "0F0,0SEND_F0,,0RECV_B0,0B0\n1RECV_F0,(1F0;1B0)OVERLAP_F_B,1SEND_B0\n"
    schedule = from_csv(text)
    assert schedule.stage_to_rank == (0, 1)
    assert schedule.num_microbatches == 1
    assert schedule.steps[0][2] is None
    assert to_csv(schedule) == text


def test_csv_takes_the_place_of_each_stage_from_its_steps() -> None:
    assert from_csv("0F0,3F0\n2F0,1F0\n").stage_to_rank == (0, 1, 1, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0x\n", "rank 0, cell 1: step"),
        ("0F0\n0B0\n", r"rank 1, cell 0: stage \(0\) of 0B0 must be on one rank"),
        ("0F0\n2F0\n", r"stage \(1\) must be on a rank"),
        ("\n", "must have at least 1"),
    ],
)
def test_bad_csv_is_refused_with_its_cell(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_csv(text)


def test_json_is_the_documented_format() -> None:
    document = json.loads(to_json(_OVERLAP))
    assert document == {
        "version": 1,
        "num_ranks": 2,
        "num_microbatches": 2,
        "stage_to_rank": [0, 1],
        "chains": [[0], [1]],
        "ranks": [
            [
                ["UNSHARD", 0],
                ["F", 0, 0],
                ["OVERLAP", ["F", 0, 1], ["B", 0, 0]],
                ["I", 0, 1],
                ["W", 0, 1],
                ["RESHARD", 0],
            ],
            [None, ["F", 1, 0], None],
        ],
    }


def _document(**changes: Any) -> dict[str, Any]:
    document = {
        "version": 1,
        "num_ranks": 1,
        "num_microbatches": 1,
        "stage_to_rank": [0],
        "ranks": [[["F", 0, 0], ["B", 0, 0]]],
    }
    return {key: value for key, value in (document | changes).items() if value != "absent"}


def test_chains_may_be_left_out_of_json() -> None:
    assert from_json(json.dumps(_document())) == gpipe(1, num_microbatches=1)


def test_the_order_of_the_halves_tells_which_overlap_it_is() -> None:
    halves = ["OVERLAP", ["B", 0, 0], ["F", 0, 0]]
    (step,) = from_json(json.dumps(_document(ranks=[[halves]]))).steps[0]
    assert str(step) == "(0B0;0F0)OVERLAP_B_F"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, r"version \(2\) must be 1"),
        ({"version": "absent"}, "must have 'version'"),
        ({"extra": 1}, r"key \('extra'\) must be one of version 1's"),
        ({"num_ranks": 2}, r"num_ranks \(2\) must equal len\(ranks\) \(1\)"),
        ({"num_microbatches": 0}, r"num_microbatches \(0\)"),
        ({"num_microbatches": True}, r"num_microbatches \(True\)"),
        ({"stage_to_rank": [0.5]}, r"stage_to_rank \(\[0.5\]\)"),
        ({"chains": [["0"]]}, r"chains\[0\] \(\['0'\]\)"),
        ({"chains": 3}, r"chains \(3\) must be a list"),
        ({"ranks": [3]}, r"rank 0: row \(3\) must be a list"),
        ({"ranks": [[["F", 0]]]}, "rank 0, cell 0: step"),
        ({"ranks": [[["F", 0, -1]]]}, "rank 0, cell 0: step"),
        ({"ranks": [[["OVERLAP_F_B", 0, 0]]]}, "rank 0, cell 0: step"),
        ({"ranks": [[["OVERLAP", ["F", 0, 0], ["F", 0, 0]]]]}, "rank 0, cell 0: sub_steps"),
        ({"ranks": [[["UNSHARD", 0, 0]]]}, "rank 0, cell 0: step"),
        ({"ranks": [["F"]]}, "rank 0, cell 0: step"),
        ({"ranks": [[["F", 1, 0]]]}, r"rank 0, cell 0: stage \(1\) of 1F0"),
    ],
)
def test_bad_json_is_refused_with_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(json.dumps(_document(**changes)))


@pytest.mark.parametrize("text", ["{", "{}", "[]"])
def test_json_that_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="schedule must"):
        from_json(text)


def test_a_file_is_read_in_either_format(tmp_path: Path) -> None:
    schedule = add_send_recv(one_f_one_b(2, num_microbatches=3))
    for name, text in (("a.json", to_json(schedule)), ("a.csv", to_csv(schedule))):
        (tmp_path / name).write_text(text)
        assert load(tmp_path / name) == schedule
