"""Let the oracle train on what a run was given, and record what it computes beside it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from hp_train.verify.oracle import Oracle
from hp_train.verify.own_trainer import MOMENTS
from hp_train.verify.program import Request
from hp_trainer.config import Config, to_dict
from hp_verify.comparing.ties import CHOICES, SCORES
from hp_verify.recording.values import RecordedStep, ValueRecorder, read_steps

_MODEL = "model."


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
