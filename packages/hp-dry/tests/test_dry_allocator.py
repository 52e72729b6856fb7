"""The model of torch's caching allocator: cases computed by hand, and what always holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from hp_dry import Segment, Usage, least_bytes, replay
from hp_dry.memory.caching import round_up
from hp_dry.trace import Allocate, Borrow, Event, HostWait, Launch, Release

MIB = 2**20


def ask(block: int, num_bytes: int, stream: int = 0) -> Allocate:
    return Allocate(block, num_bytes, stream, "aten.empty", at=f"a.py:{block}")


def sizes(usage: Usage) -> list[list[int]]:
    return [[size for size, _ in segment.blocks] for segment in usage.segments]


@pytest.mark.parametrize(
    ("num_bytes", "rounded"), [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB + 1, MIB + 512)]
)
def test_requests_are_rounded_up_to_512_bytes(num_bytes: int, rounded: int) -> None:
    assert replay([ask(1, num_bytes)]).allocated == [rounded]
    assert round_up(num_bytes) == rounded


@pytest.mark.parametrize(
    ("num_bytes", "times", "reserved", "split"),
    [
        (512, 1, 2 * MIB, 2 * MIB - 512),
        (MIB, 2, 2 * MIB, 0),
        (MIB, 3, 4 * MIB, MIB),
        (MIB + 512, 1, 20 * MIB, 19 * MIB - 512),
        (10 * MIB - 512, 3, 40 * MIB, 10 * MIB + 512),
        (10 * MIB, 1, 10 * MIB, 0),
        (10 * MIB + 512, 3, 3 * 12 * MIB, 3 * (2 * MIB - 512)),
        (19 * MIB, 1, 20 * MIB, 0),
        (50 * MIB + 1, 1, 52 * MIB, 2 * MIB - 512),
    ],
)
def test_segments_are_as_large_as_torch_makes_them(
    num_bytes: int, times: int, reserved: int, split: int
) -> None:
    """Five are what torch's own test of graphs expects of three tensors (`test_cuda.py`)."""
    usage = replay([ask(each, num_bytes) for each in range(times)])
    assert usage.peak_reserved == reserved
    free = [size for each in usage.segments for size, state in each.blocks if state == "free"]
    assert sum(free) == split


def test_19_of_20_mib_are_not_split_since_one_is_left_over() -> None:
    usage = replay([ask(1, 19 * MIB)])
    assert usage.allocated == [20 * MIB]
    assert usage.reserved == [20 * MIB]
    assert replay([ask(1, 19 * MIB - 512)]).allocated == [19 * MIB - 512]


def test_the_smallest_block_that_fits_is_taken_and_split() -> None:
    events = [ask(1, 40 * MIB), ask(2, 30 * MIB), Release(1), Release(2), ask(3, 28 * MIB)]
    usage = replay(events)
    assert sizes(usage) == [[40 * MIB], [28 * MIB, 2 * MIB]]
    assert usage.reserved[-1] == 70 * MIB


def test_free_neighbours_become_one_block() -> None:
    events: list[Event] = [ask(each, 5 * MIB) for each in range(4)]
    usage = replay([*events, Release(1), Release(3), Release(2)])
    assert sizes(usage) == [[5 * MIB, 15 * MIB]]
    assert replay([*events, Release(1), Release(3)]).segments[0].blocks[1] == (5 * MIB, "free")


def test_a_stream_does_not_get_what_another_one_left() -> None:
    events = [ask(1, MIB), Release(1), ask(2, MIB, stream=1)]
    usage = replay(events)
    assert usage.reserved[-1] == 4 * MIB
    assert [each.stream for each in usage.segments] == [0, 1]


def test_what_was_borrowed_is_free_when_the_host_has_waited_for_the_borrower() -> None:
    copy = Launch("aten.copy_", 1, 1, 8, 0, (1,), ())
    begin = [ask(1, 12 * MIB), Borrow(1, 1), copy, Release(1)]
    usage = replay([*begin, ask(2, 12 * MIB)])
    assert usage.reserved[-1] == 24 * MIB
    assert usage.allocated[-1] == 12 * MIB
    assert usage.segments[0].blocks == ((12 * MIB, "awaiting"),)
    for wait in (HostWait("synchronize", 1), HostWait("synchronize", -1)):
        assert replay([*begin, wait, ask(2, 12 * MIB)]).reserved[-1] == 12 * MIB
    late = replay([*begin, HostWait("synchronize", 0), ask(2, 12 * MIB)])
    assert late.reserved[-1] == 24 * MIB


def test_a_full_device_waits_for_borrowers_and_gives_free_segments_back() -> None:
    copy = Launch("aten.copy_", 1, 1, 8, 0, (1,), ())
    events = [ask(1, 12 * MIB), Borrow(1, 1), copy, Release(1), ask(2, 60 * MIB), Release(2)]
    usage = replay([*events, ask(3, 64 * MIB)], total_bytes=74 * MIB)
    assert usage.out_of_memory is None
    assert usage.num_retries == 1
    assert usage.peak_reserved == 72 * MIB
    assert sizes(usage) == [[64 * MIB]]


def test_what_does_not_fit_is_named() -> None:
    events = [ask(1, 40 * MIB), ask(2, 40 * MIB), ask(3, 2 * MIB), ask(4, MIB)]
    usage = replay(events, total_bytes=90 * MIB, overhead_bytes=8 * MIB)
    failed = usage.out_of_memory
    assert failed is not None
    assert (failed.index, failed.request) == (2, events[2])
    assert (failed.allocated, failed.reserved, failed.available) == (80 * MIB, 80 * MIB, 82 * MIB)
    assert "a.py:3" in str(failed)
    assert usage.indices == [0, 1, 2]


def test_a_part_of_a_segment_that_is_in_use_keeps_all_of_it() -> None:
    events = [ask(1, 40 * MIB), Release(1), ask(2, 2 * MIB), ask(3, 30 * MIB), Release(3)]
    usage = replay([*events, ask(4, 39 * MIB)], total_bytes=64 * MIB)
    assert usage.out_of_memory is not None
    assert usage.out_of_memory.reserved == 40 * MIB
    growing = replay([*events, ask(4, 39 * MIB)], total_bytes=64 * MIB, expandable_segments=True)
    assert growing.out_of_memory is None


def test_expandable_segments_grow_by_pages() -> None:
    events = [ask(1, 12 * MIB), ask(2, 12 * MIB), ask(3, 512), ask(4, 18 * MIB, stream=1)]
    usage = replay(events, expandable_segments=True)
    assert usage.reserved == [20 * MIB, 40 * MIB, 42 * MIB, 62 * MIB]
    assert sizes(usage) == [
        [12 * MIB, 12 * MIB, 16 * MIB],
        [512, 2 * MIB - 512],
        [18 * MIB, 2 * MIB],
    ]
    assert usage.num_segments == 3
    assert all(each.expandable for each in usage.segments)


def test_an_expandable_segment_grows_at_its_end_beside_free_memory() -> None:
    events = [ask(1, 20 * MIB), ask(2, 20 * MIB), Release(2), ask(3, 70 * MIB)]
    usage = replay(events, expandable_segments=True)
    assert sizes(usage) == [[20 * MIB, 70 * MIB, 10 * MIB]]
    assert usage.reserved[-1] == 100 * MIB
    assert replay(events).reserved[-1] == 110 * MIB


def test_empty_pages_of_an_expandable_segment_are_given_back() -> None:
    events = [ask(1, 60 * MIB), ask(2, 10 * MIB), Release(1), ask(3, 50 * MIB, stream=1)]
    usage = replay(events, total_bytes=90 * MIB, expandable_segments=True)
    assert usage.out_of_memory is None
    assert usage.reserved[-1] == 80 * MIB
    assert sizes(usage) == [[10 * MIB, 10 * MIB], [50 * MIB, 10 * MIB]]
    again = replay(
        [*events, Release(3), ask(4, 41 * MIB)], total_bytes=90 * MIB, expandable_segments=True
    )
    assert sizes(again)[0] == [41 * MIB, 19 * MIB, 10 * MIB, 10 * MIB]


def test_blocks_above_the_limit_are_neither_split_nor_given_to_small_requests() -> None:
    events = [ask(1, 100 * MIB), Release(1), ask(2, 20 * MIB)]
    usage = replay(events, max_split_bytes=64 * MIB)
    assert sizes(usage) == [[100 * MIB], [20 * MIB]]
    near = replay([*events[:2], ask(2, 81 * MIB)], max_split_bytes=64 * MIB)
    assert sizes(near) == [[100 * MIB]]
    assert near.allocated[-1] == 100 * MIB
    far = replay([*events[:2], ask(2, 80 * MIB)], max_split_bytes=64 * MIB)
    assert sizes(far) == [[100 * MIB], [80 * MIB]]
    full = replay([*events[:2], ask(2, 70 * MIB)], max_split_bytes=64 * MIB, total_bytes=110 * MIB)
    assert sizes(full) == [[70 * MIB]]


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="max_split_bytes"):
        replay([], max_split_bytes=20 * MIB)
    with pytest.raises(ValueError, match="overhead_bytes"):
        replay([], total_bytes=100 * MIB, overhead_bytes=200 * MIB)


def test_peaks_and_fragmentation() -> None:
    events = [ask(1, 30 * MIB), ask(2, 10 * MIB), Release(1), ask(3, 34 * MIB), Release(3)]
    usage = replay(events)
    assert usage.indices == [0, 1, 2, 3, 4]
    assert usage.allocated == [mib * MIB for mib in (30, 40, 10, 44, 10)]
    assert usage.reserved == [mib * MIB for mib in (30, 40, 40, 74, 74)]
    assert (usage.peak_allocated, usage.peak_allocated_index) == (44 * MIB, 3)
    assert (usage.peak_reserved, usage.peak_reserved_index) == (74 * MIB, 3)
    assert usage.num_segments == 3
    assert usage.fragmentation == pytest.approx(30 / 74)


def test_requests_of_nothing_take_nothing() -> None:
    usage = replay([ask(1, 0), Release(1), Release(9)])
    assert usage.peak_reserved == 0
    assert usage.segments == ()


requests = st.lists(
    st.tuples(
        st.one_of(
            st.integers(1, 2 * MIB), st.integers(MIB // 2, 12 * MIB), st.integers(1, 90 * MIB)
        ),
        st.integers(0, 2),
        st.booleans(),
        st.integers(0, 10**6),
    ),
    max_size=60,
)


def program(drawn: Sequence[tuple[int, int, bool, int]]) -> list[Event]:
    """Requests on three streams, some borrowed; before each, a block may be released."""
    events: list[Event] = []
    live: list[int] = []
    for block, (num_bytes, stream, borrowed, choice) in enumerate(drawn):
        if live and choice % 3:
            events.append(Release(live.pop(choice % len(live))))
        if choice % 11 == 0:
            events.append(HostWait("synchronize", -1))
        events += [ask(block, num_bytes, stream), Launch("aten.add", stream, 1, 8, 0, (block,), ())]
        if borrowed:
            other = (stream + 1) % 3
            events += [Borrow(block, other), Launch("aten.add", other, 1, 8, 0, (block,), ())]
        live.append(block)
    return events


def ends(events: Sequence[Event]) -> list[Event]:
    released = {each.block for each in events if isinstance(each, Release)}
    asked = [each.block for each in events if isinstance(each, Allocate)]
    return [*(Release(each) for each in asked if each not in released)]


def check_segment(segment: Segment, *, expandable: bool) -> None:
    states = [state for _, state in segment.blocks]
    assert ("free", "free") not in pairwise(states) or expandable
    assert all(size % 512 == 0 and size > 0 for size, _ in segment.blocks)
    total = sum(size for size, _ in segment.blocks)
    assert total % (2 * MIB) == 0
    assert not expandable or total % ((2 if segment.is_small else 20) * MIB) == 0
    assert not segment.is_small or expandable or total == 2 * MIB


@example(  # blocks of an expandable segment that are as large as what is never split
    [
        (62914561, 1, False, 0),
        (83886081, 0, False, 1),
        (41942529, 0, False, 0),
        (83885569, 0, False, 1),
    ],
    True,
    41943040,
    250,
)
@example(  # a hole in an expandable segment, found by chance
    [
        *[(1, 0, False, 0)] * 5,
        (1, 0, False, 1),
        (12582401, 0, False, 1),
        (77594625, 0, False, 1),
        *[(1, 0, False, 0)] * 9,
        *[(1, 0, False, 5)] * 2,
        (77594113, 0, False, 0),
        (1, 0, False, 154),
        *[(1, 0, False, 0)] * 4,
        (62914561, 1, False, 0),
    ],
    True,
    None,
    250,
)
@given(requests, st.booleans(), st.sampled_from([None, 40 * MIB]), st.sampled_from([None, 250]))
@settings(max_examples=300, deadline=None)
def test_whatever_is_asked_for(
    drawn: list[tuple[int, int, bool, int]],
    expandable: bool,
    max_split: int | None,
    total: int | None,
) -> None:
    events = program(drawn)

    def run(events: list[Event]) -> Usage:
        return replay(
            events,
            expandable_segments=expandable,
            max_split_bytes=max_split,
            total_bytes=None if total is None else total * MIB,
        )

    usage = run(events)
    assert run(events) == usage, "twice the same"
    assert all(map(int.__le__, usage.allocated, usage.reserved))
    for segment in usage.segments:
        check_segment(segment, expandable=expandable)
    if usage.reserved:
        blocks = [block for segment in usage.segments for block in segment.blocks]
        assert sum(size for size, _ in blocks) == usage.reserved[-1]
        assert sum(size for size, state in blocks if state == "allocated") == usage.allocated[-1]
    if usage.out_of_memory is not None:
        return
    wanted = 0
    live: dict[int, int] = {}
    for event in events:
        if isinstance(event, Allocate):
            live[event.block] = round_up(event.num_bytes)
        elif isinstance(event, Release):
            del live[event.block]
        wanted = max(wanted, sum(live.values()))
    assert wanted <= usage.peak_allocated <= usage.peak_reserved
    after = [HostWait("synchronize", -1), ask(10**6, 1)]
    emptied = run([*events, *ends(events), *after])
    if emptied.out_of_memory is None:
        # An expandable segment may have a hole, where its pages were given back for others.
        kept = [
            each
            for each in emptied.segments
            if len(each.blocks) > 1
            and not (expandable and all(state == "free" for _, state in each.blocks))
        ]
        assert len(kept) == 1, "the last request has the only segment that is split"
        assert emptied.allocated[-1] == 512


def step_on_cpu() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for rows in (256, 300, 256):
        loss = model(torch.randn(rows, 512)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_requests_of_a_real_program() -> None:
    """Three steps of a model as the profiler saw their allocations on the CPU."""
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as recorded:
        step_on_cpu()
    events: list[Event] = []
    numbers: dict[int, int] = {}
    live = peak = 0
    for each in recorded.profiler.kineto_results.experimental_event_tree():
        for event in [each, *descendants(each)]:
            if event.tag.name != "Allocation":
                continue
            fields = event.extra_fields
            if fields.alloc_size > 0:
                numbers[fields.ptr] = len(events)
                events.append(ask(len(events), fields.alloc_size))
            elif fields.ptr in numbers:
                events.append(Release(numbers.pop(fields.ptr)))
            else:
                continue
            live += fields.alloc_size
            peak = max(peak, live)
    assert len(events) > 100
    plain = replay(events)
    growing = replay(events, expandable_segments=True)
    assert peak <= plain.peak_allocated <= peak * 1.02
    assert plain.peak_allocated <= growing.peak_reserved <= plain.peak_reserved + 40 * MIB


def descendants(event: object) -> list[object]:
    children = getattr(event, "children", [])
    return [each for child in children for each in (child, *descendants(child))]


ANSWERS = json.loads(Path(__file__).with_name("allocator_answers.json").read_text())
"""Random requests, and what the allocator of torch 2.4 answered to each of them, its calls of
CUDA met by a stand-in: bytes allocated and reserved after every event, or `oom`."""


@pytest.mark.parametrize("case", ANSWERS)
def test_the_answers_of_torchs_own_allocator(case: dict[str, Any]) -> None:
    events: list[Event] = []
    borrowers: dict[int, int] = {}
    for line in case["history"].split(";"):
        action, *words = line.split()
        numbers = [int(word) for word in words]
        if action == "a":
            block, num_bytes, stream = numbers
            events += [ask(block, num_bytes, stream), Launch("use", stream, 1, 8, 0, (block,), ())]
        elif action == "b":
            borrowers[numbers[0]] = numbers[1]
            events.append(Borrow(*numbers))
        elif action == "w":
            events.append(HostWait("all", -1))
        else:
            if numbers[0] in borrowers:  # which is still at work when the block is released
                events.append(Launch("use", borrowers[numbers[0]], 1, 8, 0, (numbers[0],), ()))
            events.append(Release(numbers[0]))
    limit = case["max_split_mib"]
    usage = replay(
        events,
        total_bytes=case["total"],
        expandable_segments=case["expandable"],
        max_split_bytes=None if limit is None else limit * MIB,
    )
    found = [f"{a} {b}" for a, b in zip(usage.allocated, usage.reserved, strict=True)]
    if usage.out_of_memory is not None:
        found[-1] = "oom"
    assert found == case["answers"].split(";")


def test_what_is_needed_is_less_than_what_is_reserved_where_there_is_more() -> None:
    # Each is larger than the one before it, and alone: none takes the place of another.
    trace: list[Event] = []
    for each, num_bytes in enumerate((40 * MIB, 50 * MIB, 60 * MIB)):
        trace += [ask(each, num_bytes), Release(each)]
    usage = replay(trace)
    assert (usage.peak_allocated, usage.peak_reserved) == (60 * MIB, 150 * MIB)
    assert least_bytes(trace, usage) == 60 * MIB


def test_what_is_split_around_a_tensor_is_needed_beside_it() -> None:
    # The rest of the first segment is free, and too small for what comes.
    trace = [ask(1, 100 * MIB), Release(1), ask(2, 40 * MIB), ask(3, 80 * MIB)]
    usage = replay(trace)
    assert usage.peak_allocated == 120 * MIB
    least = least_bytes(trace, usage, apart=0.001)
    assert least == pytest.approx(180 * MIB, rel=0.001)
    assert replay(trace, total_bytes=least).out_of_memory is None
    assert replay(trace, total_bytes=int(0.997 * least)).out_of_memory is not None
    # A segment that grows does so behind what is free at its end.
    growing = replay(trace, expandable_segments=True)
    assert least_bytes(trace, growing, expandable_segments=True) == 120 * MIB
