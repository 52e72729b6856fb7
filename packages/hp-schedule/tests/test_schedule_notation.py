"""Schedules as CSV and JSON."""

import json
import re
import string
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_schedule import (
    MetaStep,
    MetaStepType,
    Schedule,
    add_fsdp_reduce_grad,
    add_fsdp_unshard_reshard,
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
    zero_bubble,
)
from hp_schedule.notation import parse

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


_AS_CSV = partial(to_csv, as_is=True)
_FORMATS: list[tuple[Callable[[Schedule], str], Callable[[str], Schedule]]] = [
    (_AS_CSV, from_csv),
    (to_json, from_json),
]
_SOME_SHARDED = add_fsdp_unshard_reshard(
    add_fsdp_reduce_grad(gpipe(2, num_microbatches=1)), stages=[1]
)


@pytest.mark.parametrize("schedule", [*_SCHEDULES, _OVERLAP, _SOME_SHARDED])
def test_json_reads_back_as_the_same_schedule(schedule: Schedule) -> None:
    assert from_json(to_json(schedule)) == schedule


@pytest.mark.parametrize("schedule", _SCHEDULES)
def test_csv_reads_back_as_the_same_schedule(schedule: Schedule) -> None:
    assert from_csv(to_csv(schedule, as_is=True)) == schedule


def test_json_says_which_stages_are_sharded() -> None:
    document = json.loads(to_json(_SOME_SHARDED))
    assert (document["gathered_stages"], document["reduced_stages"]) == ([1], [0, 1])
    # CSV cannot, and what has no such steps need not.
    assert from_csv(to_csv(_SOME_SHARDED)).gathered_stages is None
    assert "gathered_stages" not in json.loads(to_json(_OVERLAP))


def test_csv_is_that_of_torch() -> None:
    text = "0F0,0SEND_F0,,0RECV_B0,0B0\n1RECV_F0,(1F0;1B0)OVERLAP_F_B,1SEND_B0\n"
    schedule = from_csv(text)
    assert schedule.stage_to_rank == (0, 1)
    assert schedule.num_microbatches == 1
    assert schedule.steps[0][2] is None
    assert to_csv(schedule, as_is=True) == text


def test_a_byte_order_mark_is_no_step() -> None:
    for text in ("0F0,0B0\n", to_json(gpipe(2, num_microbatches=1))):
        assert parse("\ufeff" + text) == parse(text)


def test_csv_takes_the_place_of_each_stage_from_its_steps() -> None:
    assert from_csv("0F0,3F0\n2F0,1F0\n").stage_to_rank == (0, 1, 1, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0x\n", "rank 0, cell 1: step"),
        ("0F0\n0B0\n", r"rank 1, cell 0: stage \(0\) of 0B0 must be on one rank"),
        ("0F0\n2F0\n", r"stage \(1\) must be on a rank"),
        ("0F0,999999999999F0\n", r"stage \(1\) must be on a rank"),
        ("0F0,0B99999\n", r"microbatch_index \(99999\) must be < 32768"),
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
        ({"version": True}, r"version \(True\) must be 1"),
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
        ({"gathered_stages": [1]}, r"gathered_stages \(\[1\]\) must be of the 1 stages"),
        ({"reduced_stages": "all"}, r"reduced_stages \('all'\) must be a list of whole numbers"),
        ({"reduced_stages": None}, r"reduced_stages \(None\) must be a list of whole numbers"),
        ({"ranks": [["F"]]}, "rank 0, cell 0: step"),
        ({"ranks": [[["F", 1, 0]]]}, r"rank 0, cell 0: stage \(1\) of 1F0"),
    ],
)
def test_bad_json_is_refused_with_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(json.dumps(_document(**changes)))


@pytest.mark.parametrize("text", ["{", "{}", "[]", "[" * 100_000])
def test_json_that_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="schedule must"):
        from_json(text)


def test_a_file_is_read_in_either_format(tmp_path: Path) -> None:
    schedule = add_send_recv(one_f_one_b(2, num_microbatches=3))
    for name, text in (("a.json", to_json(schedule)), ("a.csv", to_csv(schedule, as_is=True))):
        (tmp_path / name).write_text(text)
        assert load(tmp_path / name) == schedule


def _leaf_steps(kinds: list[MetaStepType]) -> st.SearchStrategy[MetaStep]:
    return st.builds(MetaStep, st.sampled_from(kinds), st.integers(0, 3), st.integers(0, 3))


_FSDP = [kind for kind in MetaStepType if kind.is_fsdp]
_LEAVES = [kind for kind in MetaStepType if not (kind.is_overlap or kind.is_fsdp)]
_OVERLAPS = st.builds(
    lambda f, b, flip: (
        MetaStep(MetaStepType.OVERLAP_B_F, sub_steps=(b, f))
        if flip
        else MetaStep(MetaStepType.OVERLAP_F_B, sub_steps=(f, b))
    ),
    _leaf_steps([MetaStepType.FWD]),
    _leaf_steps([MetaStepType.BWD, MetaStepType.BWD_INPUT]),
    st.booleans(),
)
_STEPS = st.one_of(
    _leaf_steps(_LEAVES),
    st.builds(MetaStep, st.sampled_from(_FSDP), st.integers(0, 3)),
    _OVERLAPS,
)


@given(_STEPS)
def test_any_step_reads_back_from_its_text(step: MetaStep) -> None:
    assert MetaStep.from_str(str(step)) == step


@given(_STEPS, st.text(string.ascii_letters + string.digits + "();_,", min_size=1))
def test_a_step_with_junk_behind_it_is_refused_or_another_step(step: MetaStep, junk: str) -> None:
    try:
        found = MetaStep.from_str(f"{step}{junk}")
    except ValueError:
        return
    # Only more digits make a longer step, and with zeros in front even the same one.
    assert junk.isdecimal()
    assert found.microbatch_index != step.microbatch_index or step.microbatch_index == 0


@given(st.lists(st.lists(st.none() | _STEPS, max_size=6), min_size=1, max_size=3), st.randoms())
def test_any_rows_read_back_from_json(rows: list[list[MetaStep | None]], rng: Any) -> None:
    schedule = Schedule.from_steps(
        rows,
        stage_to_rank=[rng.randrange(len(rows)) for _ in range(4)],
        num_microbatches=4,
        chains=rng.choice([[], [[0, 1], [3, 2]], [[3, 1, 2, 0]]]),
    )
    assert from_json(to_json(schedule)) == schedule


@given(st.data())
def test_damaged_text_is_refused_or_read_as_what_it_says(data: st.DataObject) -> None:
    schedule = data.draw(st.sampled_from(_SCHEDULES))
    write, read = data.draw(st.sampled_from(_FORMATS))
    text = write(schedule)
    begin = data.draw(st.integers(0, len(text)))
    end = min(len(text), begin + data.draw(st.integers(0, 3)))
    junk = data.draw(st.text('0123456789FBIW_SENDRCV();,[]{}": \n', max_size=3))
    try:
        found = read(text[:begin] + junk + text[end:])
    except ValueError:
        return
    assert read(write(found)) == found


@pytest.mark.parametrize(
    ("compute", "backward"),
    [(interleaved_1f1b(2, num_microbatches=2), "B"), (zero_bubble(2, num_microbatches=3), "I")],
)
def test_csv_says_where_torch_waits_if_asked_to(compute: Schedule, backward: str) -> None:
    schedule = add_fsdp_reduce_grad(add_send_recv(compute))
    text = to_csv(schedule, waits=True)
    assert from_csv(text) == from_csv(to_csv(schedule))
    assert "WAIT" not in to_csv(schedule)
    for line in text.splitlines():
        words = line.split(",")
        causes = [word for word in words if re.search("(?<!WAIT_)(SEND|REDUCE)", word)]
        assert len(causes) == sum("WAIT" in word for word in words)
        for word in causes:
            wait = words.index(re.sub("SEND|REDUCE", r"WAIT_\g<0>", word))
            assert wait > words.index(word)
            if "SEND_F" in word:
                assert wait == 1 + words.index(word.replace("SEND_F", backward))


@pytest.mark.parametrize("word", ["0WAIT", "WAIT_SEND_F0", "0WAIT_SEND_F", "0WAIT_REDUCE_GRAD1"])
def test_csv_with_waits_for_nothing_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match=f"step .'{word}'. must be"):
        from_csv(f"0F0,{word}\n")


@pytest.mark.parametrize("missing", [[0, 1], [1]])
def test_csv_by_which_torch_would_not_divide_gradients_is_refused(missing: list[int]) -> None:
    schedule = add_send_recv(one_f_one_b(2, num_microbatches=3))
    if missing == [1]:
        schedule = add_fsdp_reduce_grad(schedule, stages=[0])
    text = re.escape(f"stages ({missing}) must have REDUCE_GRAD beside messages")
    with pytest.raises(ValueError, match=text):
        to_csv(schedule)
    for fine in (
        add_fsdp_reduce_grad(add_send_recv(one_f_one_b(2, num_microbatches=3))),
        add_send_recv(forward_only(2, num_microbatches=3)),
        one_f_one_b(2, num_microbatches=3),
    ):
        assert from_csv(to_csv(fine)).steps == fine.steps


def test_blank_lines_at_the_end_of_csv_are_no_ranks() -> None:
    text = to_csv(one_f_one_b(2, num_microbatches=3))
    for end in ("\n", "\r\n", "   ", "\n\n\n"):
        assert from_csv(text + end) == from_csv(text)
    idle = Schedule.from_steps(
        [[MetaStep.from_str("0F0")], []], stage_to_rank=[0], num_microbatches=1
    )
    assert from_csv(to_csv(idle)).num_ranks == 2
