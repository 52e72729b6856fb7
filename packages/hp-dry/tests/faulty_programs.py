"""Real torch programs with a fault each, and a sound version of each; see `test_dry_faults`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


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
    dist.all_gather(list(parts.chunk(2)), x, group=run.groups[0])  # named
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
    work = dist.all_gather(list(parts.chunk(2)), x, group=run.groups[0], async_op=True)  # named
    assert work is not None
    if run.is_sound:
        work.wait()
    parts.sum()  # named
    if not run.is_sound:
        work.wait()


def changes_what_is_sent(run: Run) -> None:
    x, parts = run.ones(8), run.ones(16)
    work = dist.all_gather(list(parts.chunk(2)), x, group=run.groups[0], async_op=True)  # named
    assert work is not None
    if run.is_sound:
        work.wait()
    x.zero_()  # named
    if not run.is_sound:
        work.wait()


def shrinks_what_is_received(run: Run) -> None:
    x, parts = run.ones(8), run.ones(16)
    work = dist.all_gather(list(parts.chunk(2)), x, group=run.groups[0], async_op=True)  # named
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
    assert run.groups[0] is not None
    fully_shard(model, mesh=DeviceMesh.from_group(run.groups[0], run.device))
    for _ in range(2 if not run.is_sound and run.rank == 1 else 1):
        model(run.ones(4, 8)).sum().backward()  # named
    dist.all_reduce(run.ones(8), group=run.groups[0])  # named


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        words: What the program does wrong.
        program: The program.
        says: Kind of what is found.
        sanitizer: Whether the rules of torch's CUDA sanitizer find it.
        elsewhere: What comes of it in FakeTensorMode, or under DETAIL over Gloo.
    """

    words: str
    program: Callable[[Run], None]
    says: str
    sanitizer: bool = False
    elsewhere: str = "not run"


NEEDS_CUDA = "needs CUDA"
ALONE = [
    Case(
        "a stream reads what another still writes",
        reads_before_it_is_written,
        "read before it is written",
        True,
        NEEDS_CUDA,
    ),
    Case(
        "in-place change of what a stream reads",
        changes_what_is_read,
        "changed in flight",
        True,
        NEEDS_CUDA,
    ),
    Case(
        "freed in flight: no `record_stream`",
        frees_without_record_stream,
        "freed in flight",
        False,
        NEEDS_CUDA,
    ),
    Case(
        "new memory on a stream that did not ask for it",
        uses_memory_of_another_stream,
        "memory of another stream",
        False,
        NEEDS_CUDA,
    ),
    Case(
        "an event waited for before it is recorded",
        waits_before_the_record,
        "waited for too early",
        False,
        NEEDS_CUDA,
    ),
    Case("an event recorded again elsewhere", records_again, "recorded again", False, NEEDS_CUDA),
    Case(
        "asynchronous copy from unpinned memory",
        copies_from_unpinned_memory,
        "asynchronous copy",
        False,
        NEEDS_CUDA,
    ),
    Case(
        "the host reads a copy too early",
        reads_a_copy_too_early,
        "host too early",
        False,
        NEEDS_CUDA,
    ),
    Case(
        "the host changes the source of a copy",
        changes_the_source_of_a_copy,
        "host too early",
        False,
        NEEDS_CUDA,
    ),
    Case(
        "the host reads a number of the device",
        reads_on_the_host,
        "aten._local_scalar_dense",
        False,
        "found",
    ),
    Case(
        "an operand of a fused optimizer on the host",
        steps_with_an_operand_on_the_host,
        "operands on the host",
        False,
        "nothing",
    ),
]
TOGETHER = [
    Case("a rank skips a collective", skips_a_collective, "operation", False, "found"),
    Case("a rank has another order", has_another_order, "operation", False, "found"),
    Case("a rank has another shape", has_another_shape, "shape", False, "found"),
    Case("a rank has another dtype", has_another_dtype, "dtype", False, "found"),
    Case("a rank has another reduction", has_another_reduction, "reduction", False, "nothing"),
    Case("ranks have different roots", has_another_root, "reduction", False, "time-out"),
    Case("splits that do not fit", has_other_splits, "splits", False, "length error"),
    Case("a send that nobody receives", sends_to_nobody, "message", False, "time-out"),
    Case(
        "two communicators waited for in a circle", waits_in_a_circle, "deadlock", False, "time-out"
    ),
    Case("both ranks receive before they send", both_receive_first, "deadlock", False, "time-out"),
    Case(
        "a result used before its work is waited for",
        uses_a_result_too_early,
        "collective not waited for",
        False,
        "nothing",
    ),
    Case(
        "in-place change of what is being sent",
        changes_what_is_sent,
        "changed in flight",
        False,
        "nothing",
    ),
    Case(
        "a storage resized while it is received into",
        shrinks_what_is_received,
        "freed in flight",
        False,
        "crash",
    ),
    Case(
        "FSDP2: a rank goes through the model once more",
        runs_a_module_more_often,
        "operation",
        False,
        "found",
    ),
]
