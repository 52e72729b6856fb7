"""A kernel that is loaded waits for the device, and what that can come to is found."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from hp_dry import DryDevice, late_loads, prove
from hp_dry.trace import Collective, Event, HostWait, Launch, Trace, WaitWork
from hp_platform.dry_device import launch

SHAPE = (((4,), "bfloat16"),)
OWN, TORCH = "pack.kernel bfloat16", "aten.mm.default"


def kernel(variant: str = OWN, *, thread: int = 0, line: int = 1) -> Launch:
    """A launch on the default stream."""
    what, own = (TORCH, "") if variant == TORCH else ("pack.kernel", variant)
    return Launch(what, 0, 1, 4, 0, (), (), variant=own, thread=thread, at=f"model.py:{line}")


def message(rank: int, op: str, work: int, *, thread: int = 1) -> Collective:
    """A message between ranks 0 and 1, each direction on a communicator of its own."""
    sender = rank if op == "send" else 1 - rank
    group, stream = f"edge{sender}[0,1]", 1000 + sender
    inputs, outputs = (SHAPE, ()) if op == "send" else ((), SHAPE)
    at = f"channel.py:{10 + sender}"
    return Collective(
        op, group, 5, stream, inputs, outputs, (), (), work, peer=1 - rank, thread=thread, at=at
    )


def trace(rank: int, events: Sequence[Event]) -> Trace:
    """What a rank of two did."""
    groups: dict[str, tuple[int, ...]] = {f"edge{sender}[0,1]": (0, 1) for sender in range(2)}
    families: dict[str, tuple[tuple[int, ...], ...]] = {
        f"edge{sender}": ((0, 1),) for sender in range(2)
    }
    return Trace(rank, 2, groups, [*events], families)


def test_a_kernel_that_loads_under_a_message_of_another_thread_is_named() -> None:
    early = trace(0, [kernel(), message(0, "recv", 1), kernel(line=7)])
    assert late_loads(early, eager=True) == []
    late = trace(0, [message(0, "recv", 1), kernel(line=7), kernel(line=8)])
    [problem] = late_loads(late, eager=True)
    assert (problem.kind, problem.ranks) == ("module load", (0, 1))
    assert problem.at == ("model.py:7", "channel.py:11")
    assert (
        f"{OWN} is launched first, and so loaded, at model.py:7, which waits for recv"
        in problem.text
    )


def test_another_variant_of_a_kernel_is_another_module() -> None:
    events = [kernel(), message(0, "recv", 1), kernel("pack.kernel float32", line=7)]
    [problem] = late_loads(trace(0, events), eager=True)
    assert problem.text.startswith(
        "rank 0 may wait for ever: pack.kernel float32 is launched first"
    )


def test_what_the_host_knows_to_be_done_or_launched_itself_is_no_danger() -> None:
    done = [message(0, "recv", 1), WaitWork(1, 0), HostWait("item", 0), kernel()]
    assert late_loads(trace(0, done), eager=True) == []
    assert late_loads(trace(0, [message(0, "recv", 1, thread=0), kernel()]), eager=True) == []


@pytest.mark.parametrize("eager", [True, False])
def test_modules_of_torch_are_there_only_if_they_are_loaded_at_the_start(eager: bool) -> None:
    events = [message(0, "recv", 1), kernel(TORCH)]
    assert bool(late_loads(trace(0, events), eager=eager)) == (not eager)


@pytest.mark.parametrize("variant", [OWN, TORCH])
@pytest.mark.parametrize("loaded", [True, False])
def test_two_ranks_that_load_under_each_others_receive_wait_for_ever(
    variant: str, loaded: bool
) -> None:
    """Each has its receive on the device, loads, and sends only then."""
    traces = []
    for rank in range(2):
        first = [kernel(variant)] if loaded else []
        rest = [message(rank, "recv", 1), kernel(variant, line=20 + rank), message(rank, "send", 2)]
        traces.append(trace(rank, [*first, *rest]))
    found = prove(traces)
    assert [each.kind for each in found] == ([] if loaded else ["deadlock"])
    for problem in found:
        name = "pack.kernel bfloat16" if variant == OWN else TORCH
        assert f"the host waits for the device to load {name} at model.py:20" in problem.text
        assert f"the host waits for the device to load {name} at model.py:21" in problem.text
    if variant == TORCH:
        assert prove(traces, eager_loading=True) == []


def test_the_dry_device_notes_the_variant_of_a_kernel() -> None:
    with DryDevice() as gpu:
        x = torch.empty(4, device="cuda")
        launch("pack.kernel", lambda: None, reads=[x], writes=[x], variant="float32 BLOCK=64")
        x += 1
        found = [event.variant for event in gpu.trace if isinstance(event, Launch)]
    assert found == ["pack.kernel float32 BLOCK=64", ""]
