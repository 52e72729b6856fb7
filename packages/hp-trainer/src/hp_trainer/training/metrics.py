"""The figures of a run while it runs: metrics.jsonl, lines on the console, TensorBoard events.

Note [MFU]. MFU = F x tokens per second / (P x GPUs), where

- F are the model's operations per token: three times those of the forward as hp-plan counts them,
  which is asked by an entry point (a multiplication and its addition are two, backward is two
  forwards). Without hp-plan there is no MFU.
  They are those of the products: dense matrices, router, the experts that a token goes to, logits,
  modules of multi-token prediction, and of attention half of all scores (or the window's), whatever
  documents are packed. What is run again (`train.recompute`) is not counted.
- P is the dense peak of the data sheet in `train.dtype` of the GPU of rank 0: `PEAK_TERAFLOPS`.
- Seconds are those of the whole step, with reading data, reduction and optimizer, without
  evaluation and saving.
"""

import itertools
import json
import math
import os
import resource
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias, TypedDict

import msgspec
import torch
from tqdm import tqdm

from hp_base.data_sheets import peak_flops
from hp_base.errors import RunDirectoryError
from hp_base.folder import Folder
from hp_platform import Runtime, all_gather_json, is_dry
from hp_trainer.config import Config
from hp_trainer.plugins import plugins

METRICS = "metrics.jsonl"
_LAST = 1 << 53
_LONGEST_LINE = 1 << 16


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One line of metrics.jsonl.

    Attributes:
        step: Optimizer updates done, counted from 1.
        loss: Mean cross-entropy over the step's tokens, in nats, before the update.
        balance_loss: The load-balancing term that was added to it.
        grad_norm: Gradient norm of the whole model, before clipping.
        lr: Learning rate of the update.
        tokens: Tokens trained on since the start of the run.
        tokens_per_second: Tokens per second of this step, over all ranks.
        step_seconds: Wall time of this step.
        cpu_seconds: CPU time of all ranks since the previous step, evaluation and saving included.
        peak_memory_bytes: Most that any rank has held at once so far: CUDA allocations; on a CPU
            the resident set.
        bubble: Share of the ranks' time in the pipeline that went into no stage's compute.
        mfu: Model FLOPs utilization of the step, see Note [MFU]; on GPUs
            whose peak is known.
        allocated_memory_bytes: CUDA allocations after the step, the largest of any rank: what stays
            from step to step.
        reserved_memory_bytes: Most that torch's allocator has taken of the GPU so far, likewise.
            Both are of GPUs alone.
        prediction_loss: Mean cross-entropy of the modules of multi-token prediction, where there
            are some.
        eval_loss: Mean cross-entropy on held-out text, where it was evaluated.
        compile_seconds: Seconds that torch.compile took on rank 0 since the previous step, where it
            compiled something: in the first steps, and where shapes are new.
        compiled_graphs: Graphs that it compiled in them.
        planned_seconds: Seconds that a planned step's pipeline was to take, by the costs it was
            planned with.
        padding: Share of its positions that hold nothing.
        microbatches: Its microbatches, of each data-parallel rank.
        skipped: Why the step changed nothing, where it was skipped. What is not finite is left out
            of the line then.
    """

    step: int
    loss: float
    balance_loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_second: float
    step_seconds: float
    cpu_seconds: float
    peak_memory_bytes: int
    bubble: float
    mfu: float | None = None
    allocated_memory_bytes: int | None = None
    reserved_memory_bytes: int | None = None
    prediction_loss: float | None = None
    eval_loss: float | None = None
    compile_seconds: float | None = None
    compiled_graphs: int | None = None
    planned_seconds: float | None = None
    padding: float | None = None
    microbatches: int | None = None
    skipped: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return keys and values as written: those that are there, of numbers the finite ones."""
        values = {key: value for key, value in asdict(self).items() if value is not None}
        return {k: v for k, v in values.items() if not isinstance(v, float) or math.isfinite(v)}

    def __str__(self) -> str:
        ahead = self.prediction_loss
        line = (
            f"step {self.step:>5}  loss {self.loss:.4f}"
            f"{'' if ahead is None else f'  ahead {ahead:.4f}'}  grad norm {self.grad_norm:.3f}"
            f"  lr {self.lr:.2e}  {self.tokens_per_second:,.0f} tokens/s"
            f"  {self.step_seconds * 1e3:.0f} ms  {self.peak_memory_bytes / 2**20:,.0f} MiB"
            f"  bubble {self.bubble:.0%}"
        )
        if self.reserved_memory_bytes is not None:
            line += f"  reserved {self.reserved_memory_bytes / 2**20:,.0f} MiB"
        if self.mfu is not None:
            line += f"  MFU {self.mfu:.1%}"
        if self.compile_seconds is not None:
            line += f"  compiled {self.compiled_graphs} graphs in {self.compile_seconds:.1f} s"
        if self.planned_seconds is not None:
            line += (
                f"  planned {self.planned_seconds * 1e3:.0f} ms in {self.microbatches} "
                f"microbatches, {self.padding:.1%} padding"
            )
        return line if self.eval_loss is None else f"{line}  eval loss {self.eval_loss:.4f}"


_Row = TypedDict("_Row", {f.name: f.type for f in fields(StepMetrics)}, total=False)  # type: ignore[misc]
_decode = msgspec.json.Decoder(_Row).decode


class MemoryUse(NamedTuple):
    """Bytes that a process holds, or the largest of several processes; see `StepMetrics`."""

    peak: int
    allocated: int | None = None
    reserved: int | None = None

    @classmethod
    def of(cls, device: torch.device) -> "MemoryUse":
        """Return the memory of this process, by now."""
        if device.type == "cuda":
            return cls(
                torch.cuda.max_memory_allocated(device),
                torch.cuda.memory_allocated(device),
                torch.cuda.max_memory_reserved(device),
            )
        unit = 1 if sys.platform == "darwin" else 1024
        return cls(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)

    @property
    def known(self) -> list[int]:
        """Return the figures that there are."""
        return [size for size in self if size is not None]


@dataclass(frozen=True, slots=True)
class Utilization:
    """The figures that MFU is computed from; see Note [MFU].

    Attributes:
        flops: Operations of the model per token, forward and backward.
        peak: Peak operations per second of all GPUs together.
    """

    flops: float
    peak: float

    @classmethod
    def of(cls, config: Config, runtime: Runtime, *, vocab_size: int) -> "Utilization | None":
        """Say what MFU is computed from. All ranks call this together.

        Args:
            config: Configuration of the run.
            runtime: The initialised world.
            vocab_size: Rows of the embedding.

        Returns:
            None on a CPU, on GPUs that only pretend or whose peak is not known, and where nobody
            counts operations.
        """
        count = next(plugins("hp_trainer.model_flops"), None)
        if runtime.device.type != "cuda" or count is None or is_dry():
            return None
        properties = torch.cuda.get_device_properties(runtime.device)
        told = (properties.name, str(properties.uuid))
        everyone = all_gather_json(told, of=tuple[str, str], group=runtime.control)
        peak = peak_flops(everyone[0][0], config.train.dtype)
        if peak is None:
            return None
        num_gpus = len({uuid for _, uuid in everyone})  # several ranks may share one
        return cls(count(config, vocab_size=vocab_size), peak * num_gpus)

    def at(self, tokens_per_second: float) -> float:
        """Return MFU at a rate of all ranks together."""
        return self.flops * tokens_per_second / self.peak


class Console:
    """Lines for people: a progress bar below them on a terminal, plain lines in a log.

    Args:
        enabled: False on all ranks but one.
        total: Number of steps of the run.
        done: Number of steps done already.
    """

    def __init__(self, *, enabled: bool, total: int, done: int) -> None:
        self._enabled = enabled
        # By itself tqdm takes a lock of several processes, a semaphore that outlives a rank which
        # is killed, and of which the end of the run would then warn.
        tqdm.set_lock(threading.RLock())
        self._bar = tqdm(
            total=total,
            initial=done,
            disable=not (enabled and sys.stderr.isatty()),
            unit="step",
            dynamic_ncols=True,
            leave=False,
        )

    def advance(self) -> None:
        """Move the bar on by one step."""
        self._bar.update()

    def print(self, text: str) -> None:
        """Print a line above the bar."""
        if self._enabled:
            self._bar.clear()
            print(text, flush=True)  # noqa: T201 - the console of the program
            self._bar.refresh()

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()


class MetricsWriter:
    """Appends steps to metrics.jsonl, and to TensorBoard events if asked.

    Args:
        folder: Where the files go; None writes nothing (all ranks but one).
        resume_step: Lines after this step were written by a run that was cut off; they go.
        tensorboard: Also write TensorBoard events under ``tensorboard/``.

    Raises:
        RunDirectoryError: When a line up to that step is not what a run writes.
    """

    def __init__(self, folder: Folder | None, *, resume_step: int, tensorboard: bool) -> None:
        self._file = None if folder is None else _reopen(folder, resume_step)
        self._events = _event_writer(folder, resume_step) if tensorboard and folder else None

    def write(self, metrics: StepMetrics) -> None:
        """Append one step; a reader of the file sees it at once."""
        values = metrics.as_dict()
        if self._file is not None:
            self._file.write(json.dumps(values).encode() + b"\n")
            self._file.flush()
        if self._events is not None:
            for name, value in values.items():
                if name != "step" and not isinstance(value, str):
                    self._events.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        """Finish the files."""
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()


Row: TypeAlias = Mapping[str, Any]
"""What a line of metrics.jsonl says."""


def read_metrics(folder: Folder, *, to_step: int = _LAST) -> Iterator[tuple[bytes, Row]]:
    """Return the lines of metrics.jsonl and what they say, one at a time, as the file may be long.

    Args:
        folder: Run directory; a file that is missing has no lines.
        to_step: Where to end; what follows is not looked at. A last line that was cut off is left
            out.

    Raises:
        RunDirectoryError: Naming the line that is not what a run writes.
    """
    if not folder.has(METRICS):
        return
    path, step = folder.path / METRICS, 0
    with os.fdopen(folder.open_file(METRICS), "rb") as file:
        for number in itertools.count(1):
            line = file.readline(_LONGEST_LINE) if step < to_step else b""
            if not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
                return
            row = _row(line)
            if row is None or not step < row["step"] < _LAST:
                raise RunDirectoryError(f"{path}:{number} must be the JSON of a step after {step}")
            step = row["step"]
            if step <= to_step:
                yield line, row


def _row(line: bytes) -> Row | None:
    """Return the values of a line; None if it is not the JSON of a step, with the right types."""
    try:
        row: Row = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return row if "step" in row and ("loss" in row or "skipped" in row) else None


def _reopen(folder: Folder, resume_step: int) -> IO[bytes]:
    # In one step: killed in the middle, a run would lose the lines of steps it will not repeat.
    with folder.replacing(METRICS) as file:
        for line, _ in read_metrics(folder, to_step=resume_step):
            file.write(line)
    return file


def _event_writer(folder: Folder, resume_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - optional extra

    # It knows paths only. That of a descriptor leads to where it was opened, whatever the name
    # means by now; it stays open as long as the process.
    inner = folder.sub("tensorboard", make=True)
    inner.require_files()
    by_descriptor = Path(f"/proc/self/fd/{inner.descriptor}")
    path = by_descriptor if by_descriptor.is_dir() else inner.path
    return SummaryWriter(str(path), purge_step=resume_step + 1)
