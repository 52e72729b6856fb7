"""Traces written by hand: what two streams share without a wait is found, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_dry import Hazard, check_streams
from hp_dry.trace import (
    Allocate,
    Borrow,
    Collective,
    Event,
    HostAccess,
    HostWait,
    Launch,
    RecordEvent,
    Release,
    WaitEvent,
    WaitWork,
)

MAIN, SIDE, NCCL = 0, 1, 2
BYTES = 2**12


def make(block: int, stream: int = MAIN, line: int = 1) -> Allocate:
    return Allocate(block, BYTES, stream, "aten.empty", (32, 32), "float32", at=f"make.py:{line}")


def launch(
    stream: int, reads: tuple[int, ...] = (), writes: tuple[int, ...] = (), line: int = 1
) -> Launch:
    at = f"kernel.py:{line}"
    return Launch("aten.add", stream, 1, BYTES, 0, reads, writes, at=at)


def gather(reads: tuple[int, ...], writes: tuple[int, ...], work: int = 7) -> Collective:
    return Collective(
        op="all_gather",
        group="world",
        issuer=MAIN,
        stream=NCCL,
        inputs=(((32,), "float32"),),
        outputs=(((64,), "float32"),),
        reads=reads,
        writes=writes,
        work=work,
        at="nccl.py:1",
    )


def wait_stream(waiting: int, other: int, event: int = 100) -> list[Event]:
    return [RecordEvent(event, other), WaitEvent(event, waiting)]


def only(events: list[Event]) -> Hazard:
    found = check_streams(events)
    assert len(found) == 1, [str(each) for each in found]
    return found[0]


def test_one_stream_needs_no_waits() -> None:
    events = [make(1), launch(MAIN, (), (1,)), launch(MAIN, (1,), (1,)), Release(1), make(2)]
    assert check_streams(events) == []


def test_a_read_of_what_another_stream_still_writes() -> None:
    events = [make(1), launch(MAIN, (), (1,), 3), launch(SIDE, (1,), (), 8)]
    hazard = only(events)
    assert hazard.kind == "read before it is written"
    assert hazard.first is not None
    assert (hazard.first.at, hazard.second.at) == ("kernel.py:3", "kernel.py:8")
    assert (hazard.block, hazard.shape, hazard.dtype) == (1, (32, 32), "float32")
    assert "kernel.py:3" in str(hazard)
    assert "kernel.py:8" in str(hazard)
    assert check_streams([*events[:2], *wait_stream(SIDE, MAIN), events[2]]) == []


def test_a_wait_passes_on_what_the_other_stream_had_waited_for() -> None:
    third = 5
    events = [
        make(1),
        launch(MAIN, (), (1,)),
        *wait_stream(SIDE, MAIN),
        *wait_stream(third, SIDE, 101),
        launch(third, (1,), ()),
    ]
    assert check_streams(events) == []


def test_an_event_covers_only_what_came_before_its_record() -> None:
    events = [
        make(1),
        RecordEvent(1, MAIN),
        launch(MAIN, (), (1,)),
        WaitEvent(1, SIDE),
        launch(SIDE, (1,), ()),
    ]
    assert only(events).kind == "read before it is written"


def test_a_write_while_another_stream_reads() -> None:
    events = [
        make(1),
        launch(MAIN, (), (1,)),
        *wait_stream(SIDE, MAIN),
        launch(SIDE, (1,), (), 5),
        launch(MAIN, (), (1,), 6),
    ]
    hazard = only(events)
    assert hazard.kind == "changed in flight"
    assert (hazard.first and hazard.first.at, hazard.second.at) == ("kernel.py:5", "kernel.py:6")
    assert check_streams([*events[:-1], *wait_stream(MAIN, SIDE, 3), events[-1]]) == []


def test_two_streams_that_read_need_no_order() -> None:
    events = [
        make(1),
        launch(MAIN, (), (1,)),
        *wait_stream(SIDE, MAIN),
        launch(SIDE, (1,), ()),
        launch(MAIN, (1,), ()),
    ]
    assert check_streams(events) == []


def test_two_writes_at_once() -> None:
    events = [make(1), launch(MAIN, (), (1,)), launch(SIDE, (), (1,))]
    assert only(events).kind == "written twice at once"


def test_what_a_collective_brings_is_there_after_the_wait_of_that_stream() -> None:
    begin = [make(1), make(2), launch(MAIN, (), (1,)), gather((1,), (2,))]
    hazard = only([*begin, launch(MAIN, (2,), (), 9)])
    assert hazard.kind == "collective not waited for"
    assert hazard.first is not None
    assert (hazard.first.at, hazard.second.at) == ("nccl.py:1", "kernel.py:9")
    assert check_streams([*begin, WaitWork(7, MAIN), launch(MAIN, (2,), ())]) == []
    elsewhere = [*begin, WaitWork(7, SIDE), launch(MAIN, (2,), ())]
    assert only(elsewhere).kind == "collective not waited for"


def test_a_send_buffer_stays_as_it_is_until_its_work_is_waited_for() -> None:
    begin = [make(1), make(2), launch(MAIN, (), (1,)), gather((1,), (2,))]
    assert only([*begin, launch(MAIN, (), (1,))]).kind == "changed in flight"
    assert check_streams([*begin, WaitWork(7, MAIN), launch(MAIN, (), (1,))]) == []


def test_a_collective_begins_after_what_its_issuer_was_given() -> None:
    events = [make(1, SIDE), launch(SIDE, (), (1,)), gather((1,), ())]
    assert only(events).kind == "read before it is written"


def test_operations_of_one_batch_run_side_by_side() -> None:
    def message(op: str, work: int, reads: tuple[int, ...], writes: tuple[int, ...]) -> Collective:
        return Collective(
            op=op,
            group="edge",
            issuer=MAIN,
            stream=NCCL,
            inputs=(),
            outputs=(),
            reads=reads,
            writes=writes,
            work=work,
            peer=1,
            batch=4,
        )

    begin = [make(1), make(2), launch(MAIN, (), (1,))]
    apart = [*begin, message("send", 1, (1,), ()), message("recv", 2, (), (2,))]
    assert check_streams(apart) == []
    same = [*begin, message("send", 1, (1,), ()), message("recv", 2, (), (1,))]
    assert only(same).kind == "changed in flight"


@pytest.mark.parametrize("wait", [WaitWork(7, MAIN), WaitEvent(7, MAIN), HostWait("Event", -1, 7)])
def test_a_wait_for_what_has_not_begun(wait: Event) -> None:
    hazard = only([make(1), wait, gather((1,), ()), RecordEvent(7, MAIN)])
    assert hazard.kind == "waited for too early"
    assert hazard.second == wait


def test_memory_that_is_let_go_of_while_another_stream_uses_it() -> None:
    use = [make(1, line=2), *wait_stream(SIDE, MAIN), launch(SIDE, (1,), (), 4)]
    drop = Release(1, at="drop.py:5")
    hazard = only([*use, drop, make(2)])
    assert hazard.kind == "freed in flight"
    assert hazard.first is not None
    assert (hazard.first.at, hazard.second.at) == ("kernel.py:4", "drop.py:5")
    assert hazard.shape == (32, 32)
    assert check_streams([*use, Borrow(1, SIDE), drop, make(2)]) == []
    assert check_streams([*use, *wait_stream(MAIN, SIDE, 3), drop, make(2)]) == []
    assert check_streams([*use, drop, *wait_stream(MAIN, SIDE, 3), make(2)]) == []
    assert check_streams([*use, drop, HostWait("synchronize", SIDE), make(2)]) == []
    assert check_streams([*use, drop]) == [], "nobody gets the memory"
    large = Allocate(2, 2**21, MAIN, "aten.empty")
    assert check_streams([*use, drop, large]) == [], "it is of another pool"
    assert check_streams([*use, drop, make(2, SIDE)]) == [], "it is of another stream"
    assert only([*use, Borrow(1, NCCL), drop, make(2)]).kind == "freed in flight"


def test_a_collective_keeps_what_it_works_on_until_its_work_is_waited_for() -> None:
    begin = [make(1), launch(MAIN, (), (1,)), gather((1,), ())]
    assert check_streams([*begin, Release(1), make(2), WaitWork(7, MAIN), make(3)]) == []
    hazard = only([*begin, Release(1), WaitWork(7, SIDE), make(3)])
    assert hazard.kind == "freed in flight"
    borrowed = [WaitWork(7, SIDE), Borrow(1, SIDE), Release(1), make(3)]
    assert check_streams([*begin, *borrowed]) == [], "the borrower has waited for it"
    assert only([*begin, Release(1, resized=True), make(2)]).kind == "freed in flight"


def test_memory_is_new_to_a_stream_that_did_not_ask_for_it() -> None:
    busy = [make(1), launch(MAIN, (), (1,)), Release(1), make(2, line=6)]
    hazard = only([*busy, launch(SIDE, (), (2,), 7)])
    assert hazard.kind == "memory of another stream"
    assert hazard.first is not None
    assert (hazard.first.at, hazard.second.at) == ("make.py:6", "kernel.py:7")
    assert check_streams([*busy, *wait_stream(SIDE, MAIN), launch(SIDE, (), (2,))]) == []
    assert check_streams([make(2), launch(SIDE, (), (2,))]) == [], "nobody was there before"


def test_memory_that_is_used_after_it_was_given_back() -> None:
    events = [make(1), Release(1, resized=True), launch(MAIN, (1,), ())]
    assert only(events).kind == "used after it was freed"


def test_an_event_that_is_recorded_again_elsewhere_stands_for_the_second_record() -> None:
    first, second = launch(MAIN), launch(SIDE)
    record = RecordEvent(1, MAIN, at="record.py:1")
    events = [first, record, second, RecordEvent(1, SIDE)]
    hazard = only([*events, WaitEvent(1, NCCL)])
    assert hazard.kind == "recorded again"
    assert hazard.first == record
    assert check_streams(events) == [], "nobody waits for it"
    ordered = [first, record, *wait_stream(SIDE, MAIN), second, RecordEvent(1, SIDE)]
    assert check_streams([*ordered, WaitEvent(1, NCCL)]) == [], "the second comes after the first"
    waited = [first, record, WaitEvent(1, NCCL), second, RecordEvent(1, SIDE), WaitEvent(1, NCCL)]
    assert check_streams(waited) == []


def test_the_host_reads_a_copy_after_it_waited_for_it() -> None:
    copy = Launch("aten.copy_", SIDE, 1, BYTES, 0, (1,), (), host_writes=(3,), at="copy.py:1")
    begin = [make(1, SIDE), launch(SIDE, (), (1,)), copy, RecordEvent(4, SIDE)]
    read = HostAccess("aten._local_scalar_dense", 3, at="read.py:2")
    hazard = only([*begin, read])
    assert hazard.kind == "host too early"
    assert hazard.first is not None
    assert (hazard.first.at, hazard.second.at) == ("copy.py:1", "read.py:2")
    assert check_streams([*begin, HostWait("Event.synchronize", -1, 4), read]) == []
    assert check_streams([*begin, HostWait("synchronize", -1), read]) == []
    assert only([*begin, HostWait("synchronize", MAIN), read]).kind == "host too early"


def test_the_host_leaves_the_source_of_a_copy_alone() -> None:
    copy = Launch("aten.copy_", MAIN, 1, BYTES, 0, (), (1,), host_reads=(3,))
    assert check_streams([make(1), copy, HostAccess("aten.sum", 3)]) == []
    change = HostAccess("aten.fill_", 3, writes=True)
    assert only([make(1), copy, change]).kind == "host too early"
    assert check_streams([make(1), copy, HostWait("synchronize", MAIN), change]) == []


def test_the_same_two_lines_are_reported_once() -> None:
    events: list[Event] = []
    for block in range(5):
        events += [make(block), launch(MAIN, (), (block,), 3), launch(SIDE, (block,), (), 8)]
    assert only(events).times == 5


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[int, int, bool]]:
    operation = st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans())
    return draw(st.lists(operation, max_size=30))


@given(programs())
@settings(max_examples=200, deadline=None)
def test_a_program_that_waits_before_everything_has_no_hazard(
    program: list[tuple[int, int, bool]],
) -> None:
    events: list[Event] = [make(block) for block in range(3)]
    count = 100
    for stream, block, writes in program:
        for other in range(4):
            events += wait_stream(stream, other, count)
            count += 1
        events.append(launch(stream, () if writes else (block,), (block,) if writes else ()))
    assert check_streams(events) == []


@given(programs(), st.lists(st.integers(0, 3), max_size=30))
@settings(max_examples=300, deadline=None)
def test_what_is_found_is_what_a_search_through_the_graph_of_waits_finds(
    program: list[tuple[int, int, bool]], waits: list[int]
) -> None:
    events: list[Event] = [make(block) for block in range(3)]
    last: dict[int, int] = {}
    uses: list[tuple[int, int, bool]] = []
    expected = False
    reached: list[set[int]] = []
    for number, (stream, block, writes) in enumerate(program):
        before = {last[stream]} if stream in last else set()
        if number < len(waits) and waits[number] != stream:
            events += wait_stream(stream, waits[number], 100 + number)
            before |= {last[waits[number]]} if waits[number] in last else set()
        known = before.union(*(reached[each] for each in before))
        for other, (_, its_block, its_writes) in enumerate(uses):
            conflict = its_block == block and (writes or its_writes)
            expected |= conflict and other not in known
        reached.append(known)
        uses.append((stream, block, writes))
        last[stream] = number
        events.append(launch(stream, () if writes else (block,), (block,) if writes else ()))
    assert bool(check_streams(events)) == expected


def test_memory_that_goes_round_24_streams_with_a_wait_at_each_is_in_order() -> None:
    count = 2000
    events: list[Event] = [launch(stream) for stream in range(24)]
    for block in range(count):
        stream = block % 24
        events += [make(block, stream), launch(stream, (), (block,))]
        events += wait_stream((stream + 1) % 24, stream, block)
        events += [launch((stream + 1) % 24, (block,), ()), Borrow(block, (stream + 1) % 24)]
        events.append(Release(block))
    assert check_streams(events) == []
