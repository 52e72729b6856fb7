"""Train the same small model in any layout, and look inside."""

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import msgspec
import torch
import torch.distributed as dist

from hp_base.signals import StopFlag
from hp_data import load_tokenizer
from hp_data.preparation import prepare
from hp_platform import RankInfo, backend_for, initialize, shutdown
from hp_platform.testing import run_distributed
from hp_schedule import Schedule, from_json, to_json
from hp_trainer.config import Config
from hp_trainer.launch.heartbeats import Heartbeats
from hp_trainer.launch.task import Worker
from hp_trainer.model.loss import loss_of
from hp_trainer.model.parameters import Parameter
from hp_trainer.training.gradients import Losses
from hp_trainer.training.trainer import Trainer

BASE: dict[str, dict[str, Any]] = {
    "model": {
        "dim": 32,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "expert_hidden": 16,
        "num_experts": 4,
        "top_k": 2,
        "dense_hidden": 48,
        "num_dense_layers": 1,
        "dropout": 0.1,
        "init_std": 0.1,
    },
    "data": {"seq_len": 16, "eval_fraction": 0.2},
    "train": {
        "steps": 5,
        "global_batch_size": 8,
        "microbatch_size": 2,
        "warmup_steps": 2,
        "eval_every": 0,
        "eval_batches": 1,
        "sample_tokens": 0,
    },
}


@dataclass(frozen=True)
class Result:
    """What a run computed, by name over the whole model.

    Attributes:
        losses: Of each step.
        ahead: Likewise, of multi-token prediction; empty without it.
        norms: Gradient norm of each step.
        eval_loss: After the last step.
        first_gradients: Of the first step.
        parameters: After the last step.
        moments: Of AdamW or Muon, likewise, ``exp_avg.``, ``exp_avg_sq.`` or ``momentum_buffer.``
            before the parameter's name.
        balances: Losses that balance experts, of each step.
    """

    losses: list[float] = field(default_factory=list)
    ahead: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    eval_loss: float = 0.0
    first_gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    moments: dict[str, torch.Tensor] = field(default_factory=dict)
    balances: list[float] = field(default_factory=list)


def config_of(
    layout: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    /,
    **sections: Mapping[str, Any],
) -> Config:
    """BASE with some keys of some sections replaced, first those of a layout."""
    tables: dict[str, dict[str, Any]] = {}
    for part in (BASE, layout, sections):
        for name, table in part.items():
            tables[name] = {**tables.get(name, {}), **table}
    return msgspec.convert(tables, Config)


def write_corpus(directory: Path) -> Path:
    """A little text that is the same on every machine."""
    path = directory / "corpus.jsonl"
    rows = ({"text": f"{i} squared is {i * i}, and cubed {i**3}. " * 3} for i in range(200))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare_run(config: Config, directory: Path) -> str:
    """Make the data of a run, in its directory, and the address where its ranks can meet.

    Args:
        config: Of the run; without `data.paths` it reads a little text.
        directory: Of the run.
    """
    directory.mkdir(parents=True, exist_ok=True)
    prepare(
        directory / "data",
        paths=[*config.data.paths] or [str(write_corpus(directory))],
        tokenizer=load_tokenizer(""),
        eval_fraction=config.data.eval_fraction,
    )
    return f"file://{directory}/rendezvous-{uuid4().hex}"


def train_in(
    config: Config,
    directory: Path,
    *,
    until: int | None = None,
    device: str = "cpu",
    compute: Schedule | None = None,
    prepare_rank: Callable[[], None] | None = None,
) -> Result:
    """Train in the layout of the config and bring back what rank 0 gathered.

    Args:
        config: Of the run; goes on from the directory's last checkpoint if there is one.
        directory: Of the run.
        until: Save a checkpoint after this step and end; None trains for ``train.steps``.
        device: ``"cuda"``: each rank takes a GPU, or several share one, with the backend for that.
        compute: Compute steps to run in place of those of the configured schedule.
        prepare_rank: Function of a module that each rank calls first, such as to change a library.
    """
    address = prepare_run(config, directory)
    steps = "" if compute is None else to_json(compute)
    encoded = msgspec.json.encode(config)
    run = partial(_train_rank, encoded, str(directory), until, device, address, steps=steps)
    if prepare_rank is not None:
        run = partial(_prepare_and_run, prepare_rank, run)
    results = run_distributed(run, world_size=config.world_size, timeout=120)
    assert isinstance(results[0], Result)
    return results[0]


def _prepare_and_run(
    prepare_rank: Callable[[], None], run: Callable[[], Result | None]
) -> Result | None:
    prepare_rank()
    return run()


def _train_rank(
    encoded: bytes, directory: str, until: int | None, device: str, address: str, *, steps: str
) -> Result | None:
    config = msgspec.json.decode(encoded, type=Config)
    info = RankInfo.from_env()
    assert info is not None
    if device != "cpu":
        shutdown()  # the world that `run_distributed` has made is one of Gloo
    sharers = -(-info.world_size // max(1, torch.cuda.device_count()))
    backend = backend_for(torch.device(device), ranks_per_device=sharers)
    runtime = initialize(info, device_type=device, init_method=address, backend=backend)
    worker = worker_of(info, Path(directory))
    trainer = Trainer(config, worker, runtime, load_tokenizer(""))
    if steps:
        trainer.runner = trainer.pipeline.training(loss_of, from_json(steps))
    trainer.resume()
    gradients: dict[str, torch.Tensor] = {}
    losses: list[float] = []
    ahead: list[float] = []
    norms: list[float] = []
    balances: list[float] = []

    def keep_first(_losses: Losses, _norm: float) -> None:
        if not losses:
            gradients.update(_whole(trainer, lambda parameter: parameter.local.grad))

    while trainer.step < (until or config.train.steps):
        metrics, _ = trainer.train_step(before_update=keep_first)
        losses.append(metrics.loss)
        balances.append(metrics.balance_loss)
        if metrics.prediction_loss is not None:
            ahead.append(metrics.prediction_loss)
        norms.append(metrics.grad_norm)
    if until is not None:
        trainer.save()
    eval_loss = trainer.evaluate() or 0.0
    parameters = _whole(trainer, lambda parameter: parameter.local)
    moments: dict[str, torch.Tensor] = {}
    for moment in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
        found = _whole(trainer, partial(_moment, trainer, moment), may_lack=True)
        moments |= {f"{moment}.{name}": tensor for name, tensor in found.items()}
    trainer.close()
    if info.rank:
        return None
    return Result(losses, ahead, norms, eval_loss, gradients, parameters, moments, balances)


def trained_a_step(encoded: bytes, directory: str, address: str) -> Trainer:
    """On each rank: a trainer after its first step. Whoever calls it shuts down.

    Args:
        encoded: JSON of the config.
        directory: Of the run.
        address: Where its ranks meet, from `prepare_run`.
    """
    config = msgspec.json.decode(encoded, type=Config)
    info = RankInfo.from_env()
    assert info is not None
    runtime = initialize(info, init_method=address)
    trainer = Trainer(config, worker_of(info, Path(directory)), runtime, load_tokenizer(""))
    trainer.train_step()
    return trainer


def worker_of(info: RankInfo, directory: Path) -> Worker:
    """A worker whose heartbeats nobody watches."""
    heartbeats = Heartbeats.create(directory / f"heartbeats-{info.rank}", num_ranks=info.world_size)
    return Worker(info=info, run_dir=directory, heartbeats=heartbeats, stop=StopFlag())


def _moment(trainer: Trainer, moment: str, parameter: Parameter) -> torch.Tensor | None:
    found = trainer.optimizer.state[parameter.local].get(moment)
    assert found is None or isinstance(found, torch.Tensor)
    return found


def _whole(
    trainer: Trainer, part_of: Callable[[Parameter], torch.Tensor | None], *, may_lack: bool = False
) -> dict[str, torch.Tensor]:
    """On rank 0: what parameters have, by name, put together; replicas must agree."""
    mine = []
    for parameter in trainer.parameters:
        tensor = part_of(parameter)
        assert tensor is not None or may_lack
        if tensor is not None:
            mine.append((parameter.name, parameter.shape, parameter.span, tensor.cpu().clone()))
    info = trainer.runtime.info
    everyone: list[list[Any]] | None = None if info.rank else [[]] * info.world_size
    dist.gather_object(mine, everyone, dst=0, group=trainer.runtime.control)
    whole: dict[str, torch.Tensor] = {}
    if everyone is None:
        return whole
    for name, shape, span, tensor in itertools.chain.from_iterable(everyone):
        if name not in whole:
            whole[name] = torch.full(shape, torch.nan, dtype=tensor.dtype)
        part = whole[name][tuple(slice(*bounds) for bounds in span)]
        known = ~part.isnan()
        assert torch.equal(part[known], tensor[known]), f"replicas differ: {name}"
        part.copy_(tensor)
    assert not any(tensor.isnan().any() for tensor in whole.values()), "parts are missing"
    return whole
