"""Real torch programs with a fault each, in a dry run: all are found and named by file and line.

Every program has a sound version, in which nothing is found. The same programs are given to torch's
own tools as far as those run without a GPU, and `docs/hp-platform/dry-faults.md` has what came out.
"""

from __future__ import annotations

import contextlib
import datetime
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.cuda._sanitizer import EventHandler
from torch.distributed import ProcessGroup
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from hp_platform._internals import FakeTensorMode
from hp_platform.dry import DryDevice, check_streams, prove, run_ranks
from hp_platform.dry.trace import (
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

PAGE = Path(__file__).parents[3] / "docs" / "hp-platform" / "dry-faults.md"


@dataclass(frozen=True)
class Run:
    """How a program is run.

    Attributes:
        device: `cuda`, or `cpu` for torch's own tools.
        is_sound: Whether it is to do the right thing.
        rank: Of the ranks of a program between ranks.
        groups: Two groups with all ranks.
    """

    device: str
    is_sound: bool
    rank: int = 0
    groups: tuple[ProcessGroup | None, ProcessGroup | None] = (None, None)

    def ones(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(*shape, dtype=dtype, device=self.device)


# Programs of one rank. The comments mark the lines that a report has to name.


def reads_before_it_is_written(run: Run) -> None:
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    x = run.ones(64, 64)  # named
    if run.is_sound:
        side.wait_stream(main)
    with torch.cuda.stream(side):
        y = x * 2  # named
    main.wait_stream(side)
    y.sum()


def changes_what_is_read(run: Run) -> None:
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    x = run.ones(64, 64)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        y = x * 2  # named
    if run.is_sound:
        main.wait_stream(side)
    x.zero_()  # named
    main.wait_stream(side)
    y.sum()


def frees_without_record_stream(run: Run) -> None:
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    x = run.ones(64, 64)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        x.cos()  # named
    if run.is_sound:
        x.record_stream(side)
    del x  # named
    run.ones(64, 64)
    main.wait_stream(side)


def uses_memory_of_another_stream(run: Run) -> None:
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    (run.ones(64, 64) * 2).sum()
    x = torch.empty(64, 64, device=run.device)  # named
    if run.is_sound:
        side.wait_stream(main)
    with torch.cuda.stream(side):
        x.fill_(3)  # named
    main.wait_stream(side)


def waits_before_the_record(run: Run) -> None:
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    x, done = run.ones(64, 64), torch.cuda.Event()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        y = x * 2
        if run.is_sound:
            done.record()
    main.wait_event(done)  # named
    done.record(side)
    main.wait_stream(side)
    y.sum()


def records_again(run: Run) -> None:
    side, main, third = torch.cuda.Stream(), torch.cuda.current_stream(), torch.cuda.Stream()
    done, other = torch.cuda.Event(), torch.cuda.Event()
    x = run.ones(64, 64)
    done.record(main)  # named
    with torch.cuda.stream(side):
        (other if run.is_sound else done).record()
    third.wait_event(done)  # named
    if not run.is_sound:
        third.wait_stream(main)
    with torch.cuda.stream(third):
        x.cos()
    main.wait_stream(third)


def copies_from_unpinned_memory(run: Run) -> None:
    x = torch.ones(64, 64)
    if run.is_sound:
        x = x.pin_memory()
    x.to(run.device, non_blocking=True)  # named


def reads_a_copy_too_early(run: Run) -> None:
    counts = run.ones(8)
    copy = torch.empty(8).pin_memory()
    copy.copy_(counts, non_blocking=True)  # named
    arrived = torch.cuda.Event()
    arrived.record()
    if run.is_sound:
        arrived.synchronize()
    copy.tolist()  # named


def changes_the_source_of_a_copy(run: Run) -> None:
    source = torch.ones(8).pin_memory()
    source.to(run.device, non_blocking=True)  # named
    if run.is_sound:
        torch.cuda.current_stream().synchronize()
    source.zero_()  # named


def reads_on_the_host(run: Run) -> None:
    loss = run.ones(64, 64).mean()
    if not run.is_sound:
        loss.item()  # named


def steps_with_an_operand_on_the_host(run: Run) -> None:
    weight = nn.Parameter(run.ones(8, 8))
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    if not run.is_sound:
        optimizer.state[weight]["step"] = optimizer.state[weight]["step"].cpu()
    optimizer.step()  # named


# Programs of several ranks.


def skips_a_collective(run: Run) -> None:
    x = run.ones(8)
    if run.is_sound or run.rank != 1:
        dist.all_reduce(x, group=run.groups[0])  # named
    dist.broadcast(x, 0, group=run.groups[0])  # named


def has_another_order(run: Run) -> None:
    x, parts = run.ones(8), run.ones(16)
    if run.is_sound or run.rank != 1:
        dist.all_reduce(x, group=run.groups[0])  # named
    dist.all_gather_into_tensor(parts, x, group=run.groups[0])  # named
    if not run.is_sound and run.rank == 1:
        dist.all_reduce(x, group=run.groups[0])


def has_another_shape(run: Run) -> None:
    x = run.ones(8 if run.is_sound else 8 + run.rank)
    dist.all_reduce(x, group=run.groups[0])  # named


def has_another_dtype(run: Run) -> None:
    other = torch.float32 if run.is_sound or run.rank == 0 else torch.int32
    dist.all_reduce(run.ones(8, dtype=other), group=run.groups[0])  # named


def has_another_reduction(run: Run) -> None:
    op = dist.ReduceOp.SUM if run.is_sound or run.rank == 0 else dist.ReduceOp.MAX
    dist.all_reduce(run.ones(8), op, group=run.groups[0])  # named


def has_another_root(run: Run) -> None:
    dist.broadcast(run.ones(8), 0 if run.is_sound else run.rank, group=run.groups[0])  # named


def has_other_splits(run: Run) -> None:
    sends = [2, 2] if run.is_sound or run.rank == 0 else [3, 1]
    out = run.ones(4)
    dist.all_to_all_single(out, run.ones(4), [2, 2], sends, group=run.groups[0])  # named


def sends_to_nobody(run: Run) -> None:
    x = run.ones(8)
    if run.rank == 0:
        dist.send(x, 1, group=run.groups[0])  # named
    elif run.is_sound:
        dist.recv(x, 0, group=run.groups[0])


def waits_in_a_circle(run: Run) -> None:
    """Each rank begins with another of two communicators, and waits before it goes on."""
    x = run.ones(8)
    swap = not run.is_sound and run.rank == 1
    for group in reversed(run.groups) if swap else run.groups:
        dist.all_reduce(x, group=group)  # named


def both_receive_first(run: Run) -> None:
    x, other = run.ones(8), 1 - run.rank
    if run.is_sound and run.rank == 1:
        dist.send(run.ones(8), other, group=run.groups[0])
        dist.recv(x, other, group=run.groups[0])
        return
    dist.recv(x, other, group=run.groups[0])  # named
    dist.send(run.ones(8), other, group=run.groups[0])


def uses_a_result_too_early(run: Run) -> None:
    x, parts = run.ones(8), run.ones(16)
    work = dist.all_gather_into_tensor(parts, x, group=run.groups[0], async_op=True)  # named
    assert work is not None
    if run.is_sound:
        work.wait()
    parts.sum()  # named
    if not run.is_sound:
        work.wait()


def changes_what_is_sent(run: Run) -> None:
    x, parts = run.ones(8), run.ones(16)
    work = dist.all_gather_into_tensor(parts, x, group=run.groups[0], async_op=True)  # named
    assert work is not None
    if run.is_sound:
        work.wait()
    x.zero_()  # named
    if not run.is_sound:
        work.wait()


def shrinks_what_is_received(run: Run) -> None:
    x, parts = run.ones(8), run.ones(16)
    work = dist.all_gather_into_tensor(parts, x, group=run.groups[0], async_op=True)  # named
    assert work is not None
    if run.is_sound:
        work.wait()
    parts.untyped_storage().resize_(0)  # named
    run.ones(16)
    if not run.is_sound:
        work.wait()


def runs_a_module_more_often(run: Run) -> None:
    """FSDP2: a rank that goes through the model once more than the others."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(run.device)
    fully_shard(model)
    for _ in range(2 if not run.is_sound and run.rank == 1 else 1):
        model(run.ones(4, 8)).sum().backward()  # named
    dist.all_reduce(run.ones(8), group=run.groups[0])  # named
