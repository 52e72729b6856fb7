"""Real torch programs with a fault each, in a dry run: all are found and named by file and line.

Every program has a sound version, in which nothing is found. The same programs are given to torch's
own tools as far as those run without a GPU, and
`docs/reference/tables/dry-faults.md` has what came out.
"""

from __future__ import annotations

import datetime as dt
import inspect
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from faulty_programs import ALONE, NEEDS_CUDA, TOGETHER, Case, Run
from torch._subclasses import FakeTensorMode
from torch.cuda._sanitizer import EventHandler

from hp_dry import DryDevice, check_streams, prove, run_ranks
from hp_dry.trace import (
    Allocate,
    Collective,
    Event,
    Fault,
    HostWait,
    Launch,
    RecordEvent,
    Release,
    Trace,
    WaitEvent,
)
from hp_platform.testing import run_distributed

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "tables" / "dry-faults.md"


def name_of(case: Case) -> str:
    return case.program.__name__


def named_lines(program: Callable[[Run], None]) -> list[str]:
    lines, start = inspect.getsourcelines(program)
    return [f"faulty_programs.py:{start + i}" for i, line in enumerate(lines) if "# named" in line]


def alone(case: Case, *, is_sound: bool) -> list[Event]:
    with DryDevice() as device:
        case.program(Run("cuda", is_sound))
    return device.trace.events


def reports(events: Iterable[Event]) -> list[str]:
    """Everything that a trace of one rank says is wrong; every read of the host counts here."""
    events = list(events)
    waits = ("Stream.synchronize", "Event.synchronize")
    found = [f"{x.what} at {x.at}" for x in events if isinstance(x, Fault)]
    found += [
        f"{x.what} at {x.at}" for x in events if isinstance(x, HostWait) and x.what not in waits
    ]
    return [*found, *map(str, check_streams(events))]


@pytest.mark.parametrize("case", ALONE, ids=name_of)
def test_a_fault_of_one_rank_is_found_and_named(case: Case) -> None:
    assert reports(alone(case, is_sound=True)) == []
    found = [each for each in reports(alone(case, is_sound=False)) if case.says in each]
    assert len(found) == 1
    lines = named_lines(case.program)
    assert lines
    assert all(line in found[0] for line in lines), found[0]


def rank_of_a_dry_run(program: Callable[[Run], None], is_sound: bool) -> None:
    dist.init_process_group("nccl")
    groups = (dist.group.WORLD, dist.new_group())
    program(Run("cuda", is_sound, dist.get_rank(), groups))
    dist.destroy_process_group()


@cache
def together(case: Case, *, is_sound: bool) -> tuple[list[str], list[Trace]]:
    """What is found between two ranks and on each of them, and what both did."""
    run = run_ranks(rank_of_a_dry_run, case.program, is_sound, world_size=2, timeout=60)
    found = [str(each) for each in prove(run.traces) if not each.is_warning]
    traces = list(run.traces.values())
    return [*found, *(str(hazard) for trace in traces for hazard in check_streams(trace))], traces


@pytest.mark.parametrize("case", TOGETHER, ids=name_of)
def test_a_fault_between_ranks_is_found_and_named(case: Case) -> None:
    assert together(case, is_sound=True)[0] == []
    found = [each for each in together(case, is_sound=False)[0] if each.startswith(case.says)]
    assert found
    lines = named_lines(case.program)
    assert lines
    assert all(line in found[0] for line in lines), found[0]


def sanitizer_finds(events: Iterable[Event]) -> bool:
    """Give what torch's CUDA sanitizer would see of a trace to its rules.

    It sees operators on the current stream, so a collective as one of its issuer, events and
    synchronisations. It is told nothing of `record_stream` and of memory of the host.
    """
    rules, errors = EventHandler(), []
    for event in events:
        match event:
            case Launch() | Collective():
                stream = event.issuer if isinstance(event, Collective) else event.stream
                reads, writes = set(event.reads), set(event.writes)
                names: dict[int, list[str]] = {block: [] for block in reads | writes}
                errors += rules._handle_kernel_launch(
                    stream, reads - writes, writes, set(), "", names
                )
            case Allocate():
                rules._handle_memory_allocation(event.block)
            case Release():
                rules._handle_memory_deallocation(event.block)
            case RecordEvent():
                rules._handle_event_record(event.event, event.stream)
            case WaitEvent():
                rules._handle_event_wait(event.event, event.stream)
            case HostWait(event=number) if number >= 0:
                rules._handle_event_synchronization(number)
            case HostWait(stream=stream):
                rules._handle_stream_synchronization(stream)
            case _:
                pass
    return bool(errors)


@pytest.mark.parametrize("case", ALONE, ids=name_of)
def test_what_the_rules_of_torchs_sanitizer_find_on_one_rank(case: Case) -> None:
    assert not sanitizer_finds(alone(case, is_sound=True))
    assert sanitizer_finds(alone(case, is_sound=False)) == case.sanitizer


@pytest.mark.parametrize("case", TOGETHER, ids=name_of)
def test_what_the_rules_of_torchs_sanitizer_find_of_collectives(case: Case) -> None:
    assert not any(map(sanitizer_finds, together(case, is_sound=True)[1]))
    assert any(map(sanitizer_finds, together(case, is_sound=False)[1])) == case.sanitizer


def in_fake_mode(case: Case, *, is_sound: bool) -> str:
    """What comes of a program in FakeTensorMode, on a torch that may know nothing of CUDA."""
    try:
        with FakeTensorMode():
            case.program(Run("cuda", is_sound))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is so without CUDA")
@pytest.mark.parametrize("case", ALONE, ids=name_of)
def test_what_fake_tensors_find(case: Case) -> None:
    sound, faulty = in_fake_mode(case, is_sound=True), in_fake_mode(case, is_sound=False)
    if case.elsewhere == NEEDS_CUDA:
        assert sound
    else:
        assert not sound
        assert bool(faulty) == (case.elsewhere == "found")


def over_gloo(program: Callable[[Run], None], is_sound: bool) -> str:
    """Run a program on the CPU under `TORCH_DISTRIBUTED_DEBUG=DETAIL`; return what it raised."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # type: ignore[attr-defined]
    patience = dt.timedelta(seconds=3)
    groups = (dist.new_group(timeout=patience), dist.new_group(timeout=patience))
    try:
        program(Run("cpu", is_sound, dist.get_rank(), groups))
    except RuntimeError as error:
        return str(error)
    return ""


DEFINED = [case for case in TOGETHER if case.elsewhere != "crash"]
"""Gloo writes to memory that is gone, in the other one: a segmentation fault as a rule."""


@pytest.mark.sample("skips_a_collective", "has_another_root", "waits_in_a_circle")
@pytest.mark.parametrize("case", DEFINED, ids=name_of)
def test_what_torchs_debug_level_finds_over_gloo(case: Case) -> None:
    assert run_distributed(over_gloo, case.program, True, world_size=2, timeout=60) == ["", ""]
    said = run_distributed(over_gloo, case.program, False, world_size=2, timeout=60)
    assert case.elsewhere == outcome_of(said), said


def outcome_of(said: list[str]) -> str:
    """The word of the table for what both ranks raised; empty texts: nothing."""
    if "Detected mismatch" in said[0]:
        return "found"
    if any("LengthPerRank" in text for text in said):
        return "length error"
    late = ("Timed out waiting", "failed to pass monitoredBarrier")
    if any(word in text for text in said for word in late):
        return "time-out"  # of one at least; the other may see its connection close
    return "another error" if any(said) else "nothing"


@pytest.mark.parametrize("case", [*ALONE, *TOGETHER], ids=name_of)
def test_the_page_says_what_came_out(case: Case) -> None:
    rules = "found" if case.sanitizer else "nothing"
    assert f"| {case.words} | {case.says} | {rules} | {case.elsewhere} |" in PAGE.read_text()
