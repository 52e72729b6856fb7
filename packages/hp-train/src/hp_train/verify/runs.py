"""Run layouts and the oracle, record them, compare the recordings.

Ranks are started by `hp_trainer.launch`; the oracle trains here, on what a run was given.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from hp_base.errors import RunFailedError
from hp_train.verify.compare_values import RunComparison, compare_runs
from hp_train.verify.oracle import Oracle
from hp_train.verify.own_trainer import MOMENTS
from hp_train.verify.pairs import (
    BOUNDS,
    FIXED,
    ORACLE,
    SLACK,
    TIE,
    described,
    families,
    must_be_exact,
)
from hp_train.verify.program import TRAINER, Program, Request, request_run
from hp_train.verify.rank import ENTRY, RECORDING
from hp_trainer.config import Config, DataConfig, to_dict
from hp_trainer.config.options import one_process
from hp_trainer.launch.launcher import run_entry
from hp_verify.comparing.ties import CHOICES, SCORES
from hp_verify.recording.values import RecordedStep, ValueRecorder, read_steps

_MODEL = "model."


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
            fixed=FIXED,
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


def record_oracle(actual: Path, directory: Path, *, config: Config, request: Request) -> None:
    """Train the oracle from the first weights of a recorded run, on its batches.

    Args:
        actual: Folder of the run's recording.
        directory: Folder that the oracle records the same quantities into.
        config: Configuration of the run.
        request: Request of the run.
    """
    record = ValueRecorder(directory, rank=0, tensor_steps=frozenset(request.tensor_steps) or None)
    oracle: Oracle | None = None
    with _one_thread():
        for step in read_steps(actual):
            if oracle is None:
                oracle = _oracle_of(config, step)
            _train(oracle, step, record, config=config, request=request)
            record.end_step()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread, as ranks do; of small tensors, a second one only burns time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _oracle_of(config: Config, step: RecordedStep) -> Oracle:
    weights = {
        name.removeprefix(_MODEL): tensor
        for name, tensor in step.tensors["start"].items()
        if name.startswith(_MODEL)
    }
    return Oracle(to_dict(config), weights, separator=int(_scalar(step, "separator")))


def _train(
    oracle: Oracle, step: RecordedStep, record: ValueRecorder, *, config: Config, request: Request
) -> None:
    program, index = request.program, step.index
    like = {name: tensor.dtype for name, tensor in step.tensors.get("weight", {}).items()}
    if index == 1:
        record.add("start", _state(oracle, step, "start"))
        record.add_scalar("separator", oracle.separator)
    if index == program.reload_after + 1 > 1:
        record.add("loaded", _state(oracle, step, "loaded"))
    first = int(_scalar(step, "first sequence"))
    record.add_scalar("first sequence", config.train.global_batch_size * (index - 1))
    rows = _rows(step, "", "")
    _add_rows(record, "", {"": rows}, oracle)
    skip = index == program.skipped
    limit = program.largest_norm(index, config.train.max_grad_norm)
    outcome = oracle.train_step(rows, first, max_norm=limit, skip=skip)
    record.add_scalar("loss", outcome.losses.tokens)
    record.add_scalar("balance loss", outcome.losses.balance)
    record.add_scalar("prediction loss", outcome.losses.prediction)
    if not skip:
        backwards = {name: outcome.gradients[name] for name in reversed(oracle.names)}
        record.add("gradient", _as(backwards, like))
        record.add_scalar("norm", outcome.norm)
    record.add_scalar("skipped", skip)
    record.add_scalar("learning rate", outcome.rate)
    for quantity, moments in zip(MOMENTS, oracle.moments, strict=True):
        record.add(quantity, _as(moments, like))
    record.add_scalar("updates", oracle.updates)
    record.add("weight", _as({name: oracle.weights[name] for name in oracle.names}, like))
    biases = {n: t for n, t in oracle.weights.items() if n not in oracle.names}
    record.add("correction bias", biases)
    record.add(CHOICES, outcome.choices)
    record.add(SCORES, outcome.scores)
    if index in program.evaluated:
        batches = {name: _rows(step, "eval ", name) for name in step.tensors["eval tokens"]}
        _add_rows(record, "eval ", batches, oracle)
        record.add_scalar("eval loss", oracle.evaluate(torch.cat(list(batches.values()))))
    if index == program.reload_after:
        record.add("saved", _state(oracle, step, "saved"))


def _add_rows(record: ValueRecorder, kind: str, rows: Mapping[str, Tensor], oracle: Oracle) -> None:
    tokens = {name: batch[:, :-1] for name, batch in rows.items()}
    targets = {name: oracle.aims(batch)[0] for name, batch in rows.items()}
    record.add(f"{kind}tokens", tokens, in_every_step=True)
    record.add(f"{kind}targets", targets, in_every_step=True)


def _rows(step: RecordedStep, kind: str, name: str) -> Tensor:
    """Return tokens with the one after the last; it does not matter where it is no target."""
    tokens, targets = (step.tensors[f"{kind}{what}"][name] for what in ("tokens", "targets"))
    return torch.cat((tokens, targets[:, -1:]), dim=1)


def _state(oracle: Oracle, step: RecordedStep, quantity: str) -> Mapping[str, Tensor]:
    """Return the oracle's state under a checkpoint's names, in the dtypes that the run recorded."""
    found = {f"{_MODEL}{name}": tensor for name, tensor in oracle.weights.items()}
    for moment, tensors in zip(MOMENTS.values(), oracle.moments, strict=True):
        found |= {f"optimizer.{moment}.{name}": tensor for name, tensor in tensors.items()}
    return _as(found, {n: tensor.dtype for n, tensor in step.tensors.get(quantity, {}).items()})


def _as(tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> Mapping[str, Tensor]:
    return {name: tensor.to(dtypes.get(name, tensor.dtype)) for name, tensor in tensors.items()}


def _scalar(step: RecordedStep, quantity: str) -> float:
    return float(step.tensors[quantity][""])
