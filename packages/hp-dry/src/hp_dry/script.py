"""A torch script on devices that compute nothing, under the variables that torchrun sets."""

import os
import runpy
import sys
import time
import traceback
from collections.abc import Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from hp_base.errors import ConfigError
from hp_dry.cluster import grows_segments, keeps_launch_order
from hp_dry.recording.recorder import active
from hp_dry.rehearsal import run_classes, summary_of
from hp_dry.report.labels import GRADIENTS, PARAMETERS, add_labels
from hp_dry.report.summary import Summary, report_of
from hp_dry.trace import Trace
from hp_platform.dry_device import Answer, answering

MOST_PROCESSES = 16
"""Largest number of ranks that all run; for more ranks, some must be named."""
ANSWERS = "hp_dry.answers"
"""Group of entry points, which are functions of the type `hp_platform.dry_device.Answer`."""


def rehearse_script(
    command: Sequence[str], *, num_ranks: int, ranks: Sequence[int] = (), gpus_per_node: int = 8
) -> tuple[Summary, list[Trace]]:
    """Run a script as all ranks, or as some of many ranks.

    Args:
        command: Path of the script and its arguments.
        num_ranks: Number of ranks of the world.
        ranks: Global ranks to run; the first represents all ranks that are not listed. Empty: all
            ranks.
        gpus_per_node: Devices of a machine.

    Raises:
        ConfigError: If `ranks` is empty for too many ranks, or a rank is outside the world.
    """
    began = time.monotonic()
    if not ranks and num_ranks > MOST_PROCESSES:
        raise ConfigError(
            f"--gpus ({num_ranks}) must be at most {MOST_PROCESSES} for a script, or --rank name "
            "ranks that differ; the first stands for the others"
        )
    if wrong := [rank for rank in ranks if rank >= num_ranks]:
        raise ConfigError(f"--rank ({wrong[0]}) must be below --gpus ({num_ranks})")
    named = tuple(dict.fromkeys(ranks)) or tuple(range(num_ranks))
    others = tuple(rank for rank in range(num_ranks) if rank not in named)
    classes: dict[int, tuple[int, ...]] = {rank: (rank,) for rank in named}
    classes[named[0]] = tuple(sorted((named[0], *others)))
    run = run_classes(_run, list(command), classes=classes, gpus_per_node=gpus_per_node)
    name = Path(command[0]).name
    summary = summary_of(run, classes, name=name, gpus_per_node=gpus_per_node)
    return replace(summary, seconds=time.monotonic() - began), list(run.traces.values())


def _run(command: list[str]) -> object:
    """Run the script as one rank."""
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).resolve().parent))
    handle = register_optimizer_step_post_hook(_label)
    stopped = ""
    try:
        with answering(_answer):
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            stopped = f"with status {end.code}"
    except BaseException as error:  # noqa: BLE001 - the trace until the error is reported
        stopped = _where(error, command[0])
    finally:
        handle.remove()
    trace = active().trace
    add_labels(trace)
    return report_of(
        trace,
        stopped=stopped,
        keeps_launch_order=keeps_launch_order(os.environ),
        expandable_segments=grows_segments(os.environ),
    )


def _answer(copy: Tensor, purpose: object) -> Tensor:
    """Let entry points answer a read by its purpose; without an answer the numbers stay zero."""
    for answer in _installed():
        copy = answer(copy, purpose)
    return copy


@cache
def _installed() -> Sequence[Answer]:
    return [each.load() for each in entry_points(group=ANSWERS)]


def _label(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Label the memory of an optimizer after its step."""
    device = active()
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    device.label(tensors, PARAMETERS)
    device.label((t.grad for t in tensors if t.grad is not None), GRADIENTS)
    states = optimizer.state.values()
    found = (x for state in states for x in state.values() if isinstance(x, Tensor))
    device.label(found, "optimizer")


def _where(error: BaseException, script: str) -> str:
    """Return the innermost line of the script in a traceback, and the error."""
    frames = traceback.extract_tb(error.__traceback__)
    name = os.path.realpath(script)
    lines = [frame for frame in frames if os.path.realpath(frame.filename) == name] or frames
    at = f"{os.path.relpath(lines[-1].filename)}:{lines[-1].lineno}" if lines else script
    text = " ".join(str(error).split())[:300]
    return f"at {at}: {type(error).__name__}{f': {text}' if text else ''}"
