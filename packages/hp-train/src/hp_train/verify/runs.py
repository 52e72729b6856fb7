"""Run layouts, record them, compare the recordings. Ranks are started by `hp_trainer.launch`."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from hp_base.errors import RunFailedError
from hp_train.verify.pairs import BOUNDS, ORACLE, SLACK, TIE, described, families, must_be_exact
from hp_train.verify.program import TRAINER, Program, Request, request_run
from hp_train.verify.rank import ENTRY, RECORDING
from hp_train.verify.reference import record_oracle
from hp_trainer.config import Config, DataConfig
from hp_trainer.config.options import one_process
from hp_trainer.launch.launcher import run_entry
from hp_verify.comparing.compare_values import RunComparison, compare_runs


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one layout.

    Attributes:
        layout: Layout as overrides of the config.
        against: Overrides of the layout beside which it was judged, or "one process".
        comparison: None where it could not be run.
        seconds: Seconds that running it took.
        problem: Reason why it could not be run.
    """

    layout: str
    against: str
    comparison: RunComparison | None
    seconds: float
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Tell whether the two are equal."""
        return self.comparison is not None and self.comparison.ok

    def __str__(self) -> str:
        mark = "ok  " if self.ok else "FAIL"
        result = self.comparison.summary() if self.comparison else self.problem
        return f"{mark} {self.seconds:5.1f} s  {self.layout}  against {self.against}: {result}"


class Runs:
    """Recorded runs; each config is run once.

    Args:
        scratch: An empty folder for them.
        base: Base configuration: layouts are named by how they differ from its run in one process.
        program: Program of each run.
        every_tensor: Whether tensors of all steps are compared, and not of some.
        num_runs: Number of runs whose time the first one estimates; 0: it does not.
        job: ``module:callable``, see `Build`.
    """

    def __init__(
        self,
        scratch: Path,
        *,
        base: Config,
        program: Program,
        every_tensor: bool = True,
        num_runs: int = 0,
        job: str = TRAINER,
    ) -> None:
        self._scratch, self.base, self._num_runs = scratch, base, num_runs
        tensor_steps = () if every_tensor else program.tensor_steps
        self._request = Request(job=job, program=program, tensor_steps=tensor_steps)
        self._runs: dict[bytes, Path] = {}
        self._first: dict[DataConfig, Path] = {}

    def adopt(self, config: Config, run_dir: Path) -> None:
        """Take over what an earlier process has run and recorded; it counts as the first run."""
        self._runs[msgspec.json.encode(config)] = run_dir / RECORDING
        self._first.setdefault(config.data, run_dir)

    def recording(self, config: Config) -> Path:
        """Run a config, unless it was, and return the directory of its recording.

        Raises:
            RunFailedError: When a rank failed, died or hung.
        """
        key = msgspec.json.encode(config)
        if key not in self._runs:
            run_dir = self.requested(config)
            # All read what the first one has made of the text.
            status = run_entry(config, run_dir, entry=ENTRY, data=self._scratch / "data")
            if status:
                name = described(config, self.base)
                raise RunFailedError(f"{name} ended with status {status}", status=status)
            self._runs[key] = run_dir / RECORDING
        return self._runs[key]

    def requested(self, config: Config) -> Path:
        """Make the directory of a run of a config, with what is asked of its ranks."""
        run_dir = self._scratch / f"run-{len(list(self._scratch.glob('run-*'))):04d}"
        run_dir.mkdir()
        request_run(run_dir, self._request_of(config, run_dir))
        return run_dir

    def _request_of(self, config: Config, run_dir: Path) -> Request:
        """Return what is asked of a run.

        In the middle of a run a new trainer goes on from a checkpoint: the run that came first from
        its own, every other from that of the first of the same batches, which had another layout.
        What a run itself has saved is read back whole and compared as well.
        """
        if config.data in self._first:
            return replace(self._request, source=str(self._first[config.data]))
        is_very_first = not self._first
        self._first[config.data] = run_dir
        return replace(self._request, num_runs=self._num_runs) if is_very_first else self._request

    def compare(
        self, config: Config, other: Config | None, *, bound: float | None = None
    ) -> RunComparison:
        """Run two configs and compare them.

        Args:
            config: Configuration to judge.
            other: Reference configuration; None: `hp_train.verify.oracle` trains beside the first.
            bound: Largest error that counts as equal; None: 0 where bits must be the same, else
                what the dtype allows.

        Raises:
            RunFailedError: When one of them could not be run.
        """
        if other is None:
            actual, expected = self.recording(config), self._scratch / "oracle"
            record_oracle(actual, expected, config=config, request=self._request)
        else:
            expected, actual = self.recording(other), self.recording(config)
            if bound is None and must_be_exact(config, other):
                bound = 0.0
        dtype = config.train.dtype
        return compare_runs(
            actual,
            expected,
            bound=BOUNDS[dtype] if bound is None else bound,
            tie=0.0 if dtype == "float64" else TIE,
            slack={} if dtype == "float64" else SLACK,
        )

    def judge(self, config: Config, other: Config | None) -> Verdict:
        """Compare as :meth:`compare` does, but make a failed run a verdict as well.

        Args:
            config: Configuration to judge.
            other: Reference configuration; None: the oracle.
        """
        began = time.monotonic()
        comparison, problem = None, ""
        try:
            comparison = self.compare(config, other)
        except RunFailedError as error:
            if error.exit_code > 128:  # somebody wants all of this to end
                raise
            problem = str(error)
        seconds = time.monotonic() - began
        against = described(other, self.base) if other is not None else ORACLE
        return Verdict(described(config, self.base), against, comparison, seconds, problem)


def judge_all(runs: Runs, layouts: Sequence[Config], *, has_oracle: bool) -> Iterator[Verdict]:
    """Compare one process with the oracle, every layout with one process, twins with each other.

    Args:
        runs: Takes the recordings.
        layouts: Layouts of one model, text and batch; those that must be bitwise equal are compared
            too.
        has_oracle: Whether the job is that of hp-train.
    """
    if has_oracle:
        yield runs.judge(one_process(runs.base), None)
    for layout in layouts:
        yield runs.judge(layout, one_process(replace(runs.base, data=layout.data)))
    for first, *others in families(layouts):
        for other in others:
            yield runs.judge(other, first)
