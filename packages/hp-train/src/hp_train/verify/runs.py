"""Run layouts, record them, compare the recordings. Ranks are started by `hp_train.launch`."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hp_platform.testing import RunComparison, compare_runs
from hp_train.config import Config
from hp_train.data.folders import share_data
from hp_train.errors import HpError
from hp_train.launch.launcher import run_entry
from hp_train.verify.pairs import (
    BOUNDS,
    SLACK,
    TIE,
    described,
    families,
    must_be_exact,
    one_process,
)
from hp_train.verify.rank import ENTRY, RECORDING, TRAINER, Request, request_run


class RunFailedError(HpError):
    """A layout could not be run; the launcher has said why."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.exit_code = status


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one layout.

    Attributes:
        layout: As overrides.
        against: Likewise, or "one process".
        comparison: None where it could not be run.
        seconds: For running it.
        problem: Why it could not be run.
    """

    layout: str
    against: str
    comparison: RunComparison | None
    seconds: float
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Whether the two are equal."""
        return self.comparison is not None and self.comparison.ok

    def __str__(self) -> str:
        mark = "ok  " if self.ok else "FAIL"
        result = self.comparison.summary() if self.comparison else self.problem
        return f"{mark} {self.seconds:5.1f} s  {self.layout}  against {self.against}: {result}"


class Runs:
    """Recorded runs; each config is run once.

    Args:
        scratch: An empty folder for them.
        base: What layouts are told apart by: they are named by how they differ from its run in
            one process.
        steps: To train.
        tensor_steps: Steps whose tensors are compared; empty: all.
        job: ``module:callable``, see `Build`.
    """

    def __init__(
        self,
        scratch: Path,
        *,
        base: Config,
        steps: int,
        tensor_steps: tuple[int, ...] = (),
        job: str = TRAINER,
    ) -> None:
        self._scratch, self.base = scratch, base
        self._request = Request(job=job, steps=steps, tensor_steps=tensor_steps)
        self._runs: dict[bytes, Path] = {}

    def recording(self, config: Config) -> Path:
        """Run a config, unless it was, and return the directory of its recording.

        Raises:
            RunFailedError: When a rank failed, died or hung.
        """
        key = msgspec.json.encode(config)
        if key not in self._runs:
            run_dir = self._scratch / f"run-{len(list(self._scratch.glob('run-*'))):04d}"
            run_dir.mkdir()
            share_data(self._scratch, run_dir)
            request_run(run_dir, self._request)
            status = run_entry(config, run_dir, entry=ENTRY)
            if status:
                name = described(config, self.base)
                raise RunFailedError(f"{name} ended with status {status}", status=status)
            self._runs[key] = run_dir / RECORDING
        return self._runs[key]

    def compare(
        self, config: Config, other: Config, *, bound: float | None = None
    ) -> RunComparison:
        """Run two configs and compare them.

        Args:
            config: To judge.
            other: To judge by.
            bound: Largest error that counts as equal; None: 0 where bits must be the same, else
                what the dtype allows.

        Raises:
            RunFailedError: When one of them could not be run.
        """
        dtype = config.train.dtype
        if bound is None:
            bound = 0.0 if must_be_exact(config, other) else BOUNDS[dtype]
        return compare_runs(
            self.recording(config),
            self.recording(other),
            bound=bound,
            tie=0.0 if dtype == "float64" else TIE,
            slack={} if dtype == "float64" else SLACK,
        )

    def judge(self, config: Config, other: Config) -> Verdict:
        """Like :meth:`compare`, but a run that failed is a verdict as well."""
        began = time.monotonic()
        comparison, problem = None, ""
        try:
            comparison = self.compare(config, other)
        except RunFailedError as error:
            if error.exit_code > 128:  # somebody wants all of this to end
                raise
            problem = str(error)
        seconds = time.monotonic() - began
        names = [described(either, self.base) for either in (config, other)]
        return Verdict(names[0], names[1], comparison, seconds, problem)


def judge_all(runs: Runs, layouts: Sequence[Config]) -> Iterator[Verdict]:
    """Compare every layout with one process, and those that must be bitwise equal with each other.

    Args:
        runs: Takes the recordings.
        layouts: Of one model, data and batch.
    """
    reference = one_process(runs.base)
    for layout in layouts:
        yield runs.judge(layout, reference)
    for first, *others in families(layouts):
        for other in others:
            yield runs.judge(other, first)
