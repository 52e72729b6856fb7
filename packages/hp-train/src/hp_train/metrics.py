"""What a run says while it runs: metrics.jsonl, lines on the console, TensorBoard events."""

import json
import math
import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from hp_train.drafts import replace_file


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One line of metrics.jsonl.

    Attributes:
        step: Optimizer updates done, counted from 1.
        loss: Mean cross-entropy over the step's tokens, in nats, before the update.
        balance_loss: The load-balancing term that was added to it.
        grad_norm: Of the whole model, before clipping.
        lr: Learning rate of the update.
        tokens: Tokens trained on since the start of the run.
        tokens_per_second: Of this step, over all ranks.
        step_seconds: Wall time of this step.
        cpu_seconds: CPU time of all ranks since the step before, evaluation and saving included.
        peak_memory_bytes: The largest of any rank: CUDA allocations, resident set on the CPU.
        bubble: Share of the ranks' time in the pipeline that went into no stage's compute.
        prediction_loss: Mean cross-entropy of the modules of multi-token prediction, where there
            are some.
        eval_loss: Mean cross-entropy on held-out text, where it was evaluated.
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
    prediction_loss: float | None = None
    eval_loss: float | None = None
    skipped: str | None = None

    def with_eval(self, eval_loss: float | None) -> "StepMetrics":
        """The same step, with the held-out loss measured after it, if it was."""
        return replace(self, eval_loss=eval_loss)

    def as_dict(self) -> dict[str, Any]:
        """Keys and values as written; only what there is, and of numbers only what is finite."""
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
        return line if self.eval_loss is None else f"{line}  eval loss {self.eval_loss:.4f}"


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process has held: CUDA allocations, or resident set on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Console:
    """Lines for people: a progress bar below them on a terminal, plain lines in a log.

    Args:
        enabled: False on all ranks but one.
        total: Steps of the run.
        done: Steps done before.
    """

    def __init__(self, *, enabled: bool, total: int, done: int) -> None:
        self._enabled = enabled
        self._bar = tqdm(
            total=total,
            initial=done,
            disable=not (enabled and sys.stderr.isatty()),
            unit="step",
            dynamic_ncols=True,
            leave=False,
        )

    def advance(self) -> None:
        """One step is done."""
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
        run_dir: Where the files go; None writes nothing (all ranks but one).
        resume_step: Lines after this step were written by a run that was cut off; they go.
        tensorboard: Also write TensorBoard events under ``tensorboard/``.
    """

    def __init__(self, run_dir: Path | None, *, resume_step: int, tensorboard: bool) -> None:
        self._file = None if run_dir is None else _reopen(run_dir / "metrics.jsonl", resume_step)
        self._events = _event_writer(run_dir, resume_step) if tensorboard and run_dir else None

    def write(self, metrics: StepMetrics) -> None:
        """Append one step; a reader of the file sees it at once."""
        values = metrics.as_dict()
        if self._file is not None:
            self._file.write(json.dumps(values) + "\n")
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


def read_metrics(path: Path) -> list[Mapping[str, Any]]:
    """The lines of a metrics.jsonl, without a last one that was cut off."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def _reopen(path: Path, resume_step: int) -> Any:
    kept = [row for row in read_metrics(path) if row["step"] <= resume_step]
    # In one step: killed in the middle, a run would lose the lines of steps it will not repeat.
    replace_file(path, "".join(json.dumps(row) + "\n" for row in kept).encode())
    return path.open("a")


def _event_writer(run_dir: Path, resume_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - optional extra

    return SummaryWriter(str(run_dir / "tensorboard"), purge_step=resume_step + 1)
