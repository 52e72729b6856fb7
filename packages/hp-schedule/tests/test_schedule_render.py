"""Pictures: on a terminal, as SVG, as a trace."""

import json
import pickle
import re
from xml.etree import ElementTree as ET

import pytest

from hp_schedule import (
    Costs,
    MetaStep,
    Schedule,
    Span,
    Timeline,
    add_send_recv,
    chrome_trace,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    simulate,
    step_grid,
    timeline_svg,
    timetable,
)

SVG = "{http://www.w3.org/2000/svg}"


def _plan(latency: float = 0.0) -> Timeline:
    costs = Costs(forward=0.010, input_grad=0.010, weight_grad=0.010, latency=latency)
    return simulate(add_send_recv(interleaved_1f1b(2, num_microbatches=3)), costs).timeline


def test_the_timetable_of_1f1b_looks_like_its_figure() -> None:
    assert timetable(one_f_one_b(2, num_microbatches=3)) == (
        "rank 0 | F0 F1 .  .  B0 -  F2 B1 -  .  B2 -\nrank 1 | .  F0 B0 -  F1 B1 -  F2 B2 -"
    )


def test_the_timetable_names_stages_where_a_rank_has_several() -> None:
    first = timetable(interleaved_1f1b(2, num_microbatches=2)).splitlines()[0]
    assert first.startswith("rank 0 | 0F0 0F1 2F0 2F1")


def test_the_timetable_shows_an_overlap_as_one_wide_cell() -> None:
    steps = [MetaStep.from_str(text) for text in ("0F0", "(0B0;0F1)OVERLAP_B_F", "0B1")]
    schedule = Schedule.from_steps([steps], stage_to_rank=[0], num_microbatches=2)
    assert timetable(schedule).split() == ["rank", "0", "|", "F0", "B0+F1", "-", "-", "B1", "-"]


def test_the_grid_shows_cells_as_they_stand_and_marks_one() -> None:
    grid = step_grid(add_send_recv(gpipe(2, num_microbatches=1)), mark=(1, 2))
    assert "rank 0" in grid.splitlines()[0]
    (marked,) = [line for line in grid.splitlines() if line.endswith("<-- here")]
    assert marked.split()[:3] == ["2", "0RECV_B0", ">1B0<"]


def test_the_grid_shows_only_what_is_around_the_mark() -> None:
    grid = step_grid(one_f_one_b(2, num_microbatches=50), mark=(0, 60), context=2)
    assert [line.split()[0] for line in grid.splitlines()[1:]] == ["58", "59", "60", "61", "62"]


def test_the_picture_is_well_formed_and_needs_nothing_else() -> None:
    text = timeline_svg({"planned <1>": _plan(), "actual": _plan(0.002)})
    root = ET.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert "href" not in text
    assert "url(" not in text
    assert "prefers-color-scheme:dark" in text
    assert "planned &lt;1&gt;" in text


def test_every_compute_step_is_a_block_that_tells_what_it_is() -> None:
    timeline = _plan()
    root = ET.fromstring(timeline_svg({"planned": timeline}))
    tips = [tip.text or "" for tip in root.iterfind(f"{SVG}rect/{SVG}title")]
    computed = [span for span in timeline if span.step.type.is_compute]
    blocks = [tip for tip in tips if "waiting" not in tip]
    assert len(blocks) == len(computed)
    assert "rank 0, forward of stage 2, microbatch 1: 40 to 50 ms" in blocks


def test_rows_have_their_rank_and_bubble_and_panels_share_one_axis() -> None:
    long, short = _plan(0.004), _plan()
    text = timeline_svg({"planned": short, "actual": long})
    assert text.count(">rank 1<") == 2
    assert f">{short.bubble[0]:.1%}<" in text
    ticks = re.findall(r'class="muted mid" x="([0-9.]+)"[^>]*>([0-9.]+)', text)
    half = len(ticks) // 2
    assert ticks[:half] == ticks[half:]
    assert 5 <= half <= 13


def test_numbers_stand_only_in_cells_that_hold_them() -> None:
    wide = timeline_svg({"few": simulate(one_f_one_b(2, num_microbatches=2)).timeline})
    narrow = timeline_svg({"many": simulate(one_f_one_b(2, num_microbatches=900)).timeline})
    assert wide.count('class="cell"') == 8
    assert narrow.count('class="cell"') == 0


def test_an_overlap_is_drawn_as_two_halves() -> None:
    step = MetaStep.from_str("(0F1;0B0)OVERLAP_F_B")
    text = timeline_svg({"one": Timeline([Span(0, step, 0.0, 1.0)])})
    root = ET.fromstring(text)
    heights = [
        rect.get("height")
        for rect in root.iterfind(f"{SVG}rect")
        if rect.find(f"{SVG}title") is not None
    ]
    assert heights == ["13.00", "13.00"]


def test_a_picture_needs_a_timeline_but_it_may_be_empty() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        timeline_svg({})
    ET.fromstring(timeline_svg({"nothing": Timeline()}))


def test_a_trace_has_a_process_per_timeline_and_a_thread_per_rank() -> None:
    trace = json.loads(json.dumps(chrome_trace({"planned": _plan(), "actual": _plan(0.001)})))
    events = trace["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert names == {(0, "planned"), (1, "actual")}
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert threads == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_trace_events_are_complete_and_in_microseconds_from_zero() -> None:
    timeline = Timeline(
        Span(span.rank, span.step, 1.7e9 + span.start, 1.7e9 + span.end) for span in _plan()
    )
    events = [e for e in chrome_trace({"actual": timeline})["traceEvents"] if e["ph"] == "X"]
    assert len(events) == len(timeline)
    assert min(event["ts"] for event in events) == 0
    assert all(event["dur"] >= 0 for event in events)
    first = next(event for event in events if event["name"] == "2F1")
    assert first["ts"] == pytest.approx(40_000, abs=1)
    assert first["dur"] == pytest.approx(10_000, abs=1)
    assert first["args"] == {"type": ["FWD"], "stage": [2], "microbatch": [1]}


def test_a_timeline_sorts_its_spans_and_survives_pickling() -> None:
    timeline = _plan()
    again = pickle.loads(pickle.dumps(Timeline(reversed(timeline))))
    assert again == timeline
    assert again.num_ranks == 2
    assert again.makespan == timeline.makespan
