"""The model of torch's caching allocator beside the real one: its recorded history, replayed.

`events_of` makes a trace of the history that torch records of its allocator; what the model
reserves for it is compared with what torch did reserve. The first tests need no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from hp_dry import replay
from hp_dry.trace import Allocate, Borrow, Event, HostWait, Launch, Release

MIB = 2**20
BORROWERS = 2**40
"""Streams that stand for whoever borrowed a block, one for each, so that each can be done alone."""


def events_of(history: Sequence[dict[str, Any]]) -> list[Event]:
    """Make a trace of `torch.cuda.memory._snapshot()["device_traces"][device]`.

    A block whose release is not completed at once was borrowed by another stream: it is completed
    when torch saw that stream done, which the trace says as a wait of the host.
    """
    events: list[Event] = []
    blocks: dict[int, int] = {}
    awaited: dict[int, int] = {}
    for number, entry in enumerate(history):
        action, address = entry["action"], entry["addr"]
        if action == "alloc":
            blocks[address] = number
            events.append(Allocate(number, entry["size"], entry["stream"], "alloc"))
        elif action == "free_requested" and address in blocks:
            block = blocks.pop(address)
            following = history[number + 1] if number + 1 < len(history) else {}
            if (following.get("action"), following.get("addr")) != ("free_completed", address):
                awaited[address] = BORROWERS + number
                events.append(Borrow(block, BORROWERS + number))
                events.append(Launch("borrowed", BORROWERS + number, 1, 0, 0, (block,), ()))
            events.append(Release(block))
        elif action == "free_completed" and address in awaited:
            events.append(HostWait("free_completed", awaited.pop(address)))
    return events


def entry(action: str, addr: int, size: int = 0, stream: int = 0) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": stream}


def test_a_history_becomes_requests_and_releases() -> None:
    history = [
        entry("segment_alloc", 0, 20 * MIB),
        entry("alloc", 0, 5 * MIB),
        entry("free_requested", 0, 5 * MIB),
        entry("free_completed", 0, 5 * MIB),
        entry("alloc", 0, 6 * MIB),
    ]
    events = events_of(history)
    assert [type(each) for each in events] == [Allocate, Release, Allocate]
    assert replay(events).reserved == [20 * MIB] * 3


def test_a_release_that_is_completed_later_waits_for_a_borrower() -> None:
    begin = [entry("alloc", 0, 12 * MIB), entry("free_requested", 0, 12 * MIB)]
    done, ask = entry("free_completed", 0, 12 * MIB), entry("alloc", 64 * MIB, 12 * MIB)
    assert replay(events_of([*begin, ask, done])).reserved[-1] == 24 * MIB
    assert replay(events_of([*begin, done, ask])).reserved[-1] == 12 * MIB
    late = [*begin, entry("snapshot", 0), done, ask]
    assert replay(events_of(late)).reserved[-1] == 12 * MIB


def steps(num_steps: int) -> None:
    """Steps over batches of different sizes, with copies on a second stream that borrows them."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    side = torch.cuda.Stream()
    for step in range(num_steps):
        x = torch.randn(512 + 640 * step, 1024, device="cuda")
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            copy = x.cpu()
        x.record_stream(side)
        del x, copy


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("expandable", [False, True])
def test_what_torch_reserved_on_a_gpu(expandable: bool) -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    set_option = torch.cuda.memory._set_allocator_settings
    set_option(f"expandable_segments:{expandable}")
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(max_entries=10**6, context=None)
    try:
        steps(6)
        history = torch.cuda.memory._snapshot()["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
        set_option("expandable_segments:False")
    usage = replay(events_of(history[torch.cuda.current_device()]), expandable_segments=expandable)
    assert usage.peak_allocated == torch.cuda.max_memory_allocated() - allocated
    assert usage.peak_reserved == torch.cuda.max_memory_reserved() - reserved
