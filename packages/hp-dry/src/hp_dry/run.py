"""One process for every class of ranks: `run_ranks`."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from hp_dry.cluster import Classes, Gpu
from hp_dry.device import DryDevice
from hp_dry.trace import Trace
from hp_dry.world.hub import Hub, HubClient
from hp_dry.world.world import DryWorld
from hp_platform._internals import known_groups
from hp_platform.failures.failures import describe, is_echo
from hp_platform.threads import place_of

_DIE_WITH_PARENT = 1
_LOOK_SECONDS = 0.2
_SETTLE_SECONDS = 2.0  # a rank that failed first may report later than ranks that noticed
_inherited: list[ProcessGroup] = []
"""Groups of the caller, which its forks must not destroy: Gloo would wait for threads."""


class DryRunError(RuntimeError):
    """Error of a rank of a dry run that raised, ended early or hung.

    Attributes:
        rank: Global rank that failed first.
        at: `file:line` that raised; "" if no line did.
        kind: Name of the exception's class; "" if there was none.
        traces: Traces of the ranks that could still write theirs, by global rank.
    """

    def __init__(
        self, message: str, rank: int, at: str, kind: str, traces: Mapping[int, Trace]
    ) -> None:
        super().__init__(message)
        self.rank, self.at, self.kind, self.traces = rank, at, kind, traces


@dataclass(frozen=True)
class DryRun:
    """Results and traces of the processes of a dry run.

    Attributes:
        results: Result of `function` in each process, read from JSON, by representative.
        traces: Traces of all processes, by representative.
        classes: Classes of the ranks, each with the representative that ran for it in a process.
    """

    results: Mapping[int, Any]
    traces: Mapping[int, Trace]
    classes: Classes


@dataclass(slots=True)
class _Child:
    process: ForkProcess
    folder: Path
    rank: int
    outcome: dict[str, Any] = field(default_factory=dict)


def run_ranks(
    function: Callable[..., object],
    *args: object,
    world_size: int,
    representatives: Mapping[int, Sequence[int]] | None = None,
    timeout: float = 600.0,
    local_world_size: int = 8,
    gpu: Gpu | None = None,
) -> DryRun:
    """Call a function in one process per class of ranks, each on a dry device.

    The variables of torchrun are set, so that `hp_platform.initialize(device_type="cuda")` and
    `torch.distributed.init_process_group` work; nothing listens on a network. Processes are forks
    of this process, which should have no threads. The representative of a class answers for ranks
    without a process.

    Args:
        function: Function of each rank, called with `args`; its result must be JSON.
        *args: Arguments of any type, which forks inherit.
        world_size: Number of ranks.
        representatives: Global rank of the representative -> global ranks of its class; None: every
            rank has a process.
        timeout: Seconds until all ranks must have ended.
        local_world_size: Ranks per machine.
        gpu: Kind of GPU that every rank has; None: an H100.

    Raises:
        ValueError: If the representatives are not a partition of the world.
        DryRunError: If a rank raises, ends early or does not end in time. All processes are ended.
    """
    classes = Classes.of(representatives, world_size=world_size)
    with tempfile.TemporaryDirectory(prefix="hp-dry-") as name:
        folder = Path(name)
        hub = Hub(folder / "hub")
        children = []
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            for rank in classes.members:
                place = (classes, rank, local_world_size, gpu)
                process = multiprocessing.get_context("fork").Process(
                    target=_child, args=(folder, place, function, args, timeout), daemon=False
                )
                process.start()
                children.append(_Child(process, folder, rank))
            failed = _serve(hub, children, time.monotonic() + timeout)
        finally:
            _end(children)
            hub.close()
        traces = {
            child.rank: Trace.read(path)
            for child in children
            if (path := folder / f"{child.rank}.trace").exists()
        }
        if failed is not None:
            raise _error(failed, children, traces)
        return DryRun({c.rank: c.outcome["result"] for c in children}, traces, classes)


def _serve(hub: Hub, children: list[_Child], deadline: float) -> tuple[_Child | None, str] | None:
    """Answer the children until all have ended; return a failed child, or the waits at the end."""
    running = {child.process.sentinel: child for child in children}
    suspect: tuple[float, _Child] | None = None
    while running:
        ready = wait([*hub.sources, *running], timeout=_LOOK_SECONDS)
        for source in ready:
            if source not in running:
                hub.serve(source)
        hub.look()
        for source in [source for source in ready if source in running]:
            child = running.pop(source)
            child.process.join()
            child.outcome = _outcome_of(child)
            failure = child.outcome.get("error")
            hub.end_of(child.rank)
            if failure is not None and not child.outcome.get("echo"):
                return child, ""
            if failure is not None and suspect is None:
                suspect = (time.monotonic() + _SETTLE_SECONDS, child)
        now = time.monotonic()
        if suspect is not None and (now > suspect[0] or not running):
            return suspect[1], ""
        if now > deadline:
            return None, "; ".join(hub.waiting_in_words())
    return None


def _outcome_of(child: _Child) -> dict[str, Any]:
    path = child.folder / f"{child.rank}.json"
    if path.exists():
        outcome: dict[str, Any] = json.loads(path.read_text())
        return outcome
    error = f"it ended with exit status {child.process.exitcode}"
    return {"error": error, "kind": "", "at": "", "traceback": ""}


def _error(
    failed: tuple[_Child | None, str], children: list[_Child], traces: Mapping[int, Trace]
) -> DryRunError:
    child, waits = failed
    if child is not None:
        outcome = child.outcome
        at = f" at {outcome['at']}" if outcome["at"] else ""
        text = f"rank {child.rank} failed{at}: {outcome['error']}\n{outcome['traceback']}"
        return DryRunError(text.rstrip(), child.rank, outcome["at"], outcome["kind"], traces)
    late = [child for child in children if not child.outcome]
    ranks = [child.rank for child in late]
    stacks = [
        f"rank {child.rank} stands at:\n{path.read_text()}"
        for child in late
        if (path := child.folder / f"{child.rank}.stack").exists()
    ]
    text = "\n".join([f"ranks {ranks} did not end in time; {waits or 'none waits'}", *stacks])
    return DryRunError(text.rstrip(), ranks[0], "", "", traces)


def _end(children: Sequence[_Child]) -> None:
    """End processes and their children."""
    for child in children:
        if child.process.is_alive():
            try:
                os.killpg(child.process.pid or 0, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                child.process.kill()
        child.process.join()


def _child(
    folder: Path,
    place: tuple[Classes, int, int, Gpu | None],
    function: Callable[..., object],
    args: Sequence[object],
    timeout: float,
) -> None:
    """Run one rank: call the function, and write its result and its trace to the folder."""
    gc.freeze()  # modules from before the fork, or each rank would search and copy them
    _inherited.extend(known_groups())
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    classes, rank, local_world_size, gpu = place
    stack = (folder / f"{rank}.stack").open("w")
    faulthandler.dump_traceback_later(timeout * 0.9, file=stack)
    torch.set_num_threads(1)  # a fork has no threads of the pool that torch believes to have
    size = len(classes.representative)
    local = min(local_world_size, size)
    os.environ.update(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank % local),
            "LOCAL_WORLD_SIZE": str(local),
            "GROUP_RANK": str(rank // local),
            "MASTER_ADDR": "dry.invalid",
            "MASTER_PORT": "1",
        }
    )
    os.environ.pop("HP_INIT_METHOD", None)
    device = DryDevice(rank, size, gpu=gpu, local_rank=rank % local)
    client = HubClient(folder / "hub", rank)
    try:
        with device, DryWorld(device, classes, client):
            outcome = {"result": function(*args)}
        text = json.dumps(outcome)
    except BaseException as error:  # noqa: BLE001 # reported to the parent
        outcome = {
            "error": _words(error),
            "kind": type(error).__name__,
            "at": _line_of(error),
            "echo": is_echo(error),
            "traceback": "".join(traceback.format_exception(error)),
        }
        text = json.dumps(outcome)
    unfinished = folder / f"{rank}.tmp"  # this process may be ended at any time
    device.trace.write(unfinished)
    unfinished.rename(folder / f"{rank}.trace")
    unfinished.write_text(text)
    unfinished.rename(folder / f"{rank}.json")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _words(error: BaseException) -> str:
    place = place_of(error)
    return f"{describe(error)}{f' (in {place})' if place else ''}"


def _line_of(error: BaseException) -> str:
    """Return the innermost line of the caller's own program that the exception has passed."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
    own = [frame for frame in frames if not frame.filename.startswith(inside)] or frames[-1:]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""
