"""One state through many layouts: saved under each, loaded under the next, the same bits."""

import hashlib
import itertools
import time
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from hp_plan.layouts.space import AXES, sample_layouts
from hp_trainer.config import Config
from hp_trainer.config.options import resolve
from hp_trainer.launch.launcher import run_entry
from hp_trainer.launch.task import Worker
from hp_trainer.training.train import start
from hp_trainer.training.trainer import Trainer
from integration_tests.reliability.outcome import Outcome, output_to

MODEL = Path(__file__).parent.parent / "verify.toml"
ENTRY = "integration_tests.reliability.reloads:rank"
DIGEST = "digest-"
_STEPS = 2
_WITHOUT_EFFECT = (
    "mesh.cp_heads",
    "mesh.cp_ring",
    "pipeline.overlap",
    "train.microbatch_size",
    "train.recompute",
    "data.packing",
)
"""What does not change what a rank holds, and which batches there are: that stays in a run."""


def run(count: int, folder: Path, *, seed: int, data: Path) -> Outcome:
    """Train two steps, then load and save under `count` layouts, one after the other."""
    began = time.monotonic()
    given = [("run.output_dir", str(folder)), ("data.paths", str(data))]
    config = resolve(str(MODEL), given, env={}).config
    axes = [axis for axis in AXES if axis.key not in _WITHOUT_EFFECT]
    sample = sample_layouts(config, count + 1, seed=seed, num_processes=range(1, 5), axes=axes)
    run_dir = folder / "reloads"
    run_dir.mkdir()
    failures = []
    expected = ""
    for number, layout in enumerate(sample.layouts):
        what = f"layout {number} ({layout.mesh} {layout.pipeline}), seed {seed}"
        with output_to(folder / "reloads.txt"):
            status = run_entry(layout, run_dir, entry=ENTRY)
        if status:
            text = (folder / "reloads.txt").read_text()[-300:]
            failures.append(f"{what}: status {status}: {text!r}")
            continue
        found = {(run_dir / f"{DIGEST}{rank}").read_text() for rank in range(layout.world_size)}
        expected = expected or min(found)
        if found != {expected}:
            failures.append(f"{what}: other bits")
    notes = [f"{sample.num_covered} of {sample.num_pairs} pairs of layout choices"]
    return Outcome("reloads", count, failures, time.monotonic() - began, notes)


def rank(config: Config, *, worker: Worker) -> int:
    """Load, or train if there is nothing to load; tell the digest of the whole state; save."""
    trainer = start(config, worker)
    trainer.resume()
    while trainer.step < _STEPS:
        trainer.train_step()
    (worker.run_dir / f"{DIGEST}{worker.info.rank}").write_text(_digest(trainer))
    trainer.save()
    trainer.close()
    return 0


def _digest(trainer: Trainer) -> str:
    """Of every value by global name and index, put together from all ranks by their spans."""
    mine: list[tuple[str, tuple[int, ...], tuple[tuple[int, int], ...], Tensor]] = []
    for parameter in trainer.parameters:
        state = trainer.optimizer.state[parameter.local]
        values = {"": parameter.local} | {f"{m} ": state[m] for m in ("exp_avg", "exp_avg_sq")}
        mine += [
            (prefix + parameter.name, parameter.shape, parameter.span, value.detach().clone())
            for prefix, value in values.items()
        ]
        assert int(state["step"]) == trainer.step
    everyone: list[list[tuple[str, tuple[int, ...], tuple[tuple[int, int], ...], Tensor]]]
    everyone = [[] for _ in range(trainer.runtime.info.world_size)]
    dist.all_gather_object(everyone, mine, group=trainer.runtime.control)
    whole: dict[str, Tensor] = {}
    for name, shape, span, value in itertools.chain.from_iterable(everyone):
        if name not in whole:
            whole[name] = value.new_full(shape, float("nan"))
        whole[name][tuple(slice(*bounds) for bounds in span)] = value
    digest = hashlib.sha256(f"{trainer.step} {trainer.next_sequence}".encode())
    for name in sorted(whole):
        assert not whole[name].isnan().any(), f"{name} has holes"
        digest.update(f"{name} {whole[name].dtype} {list(whole[name].shape)}".encode())
        digest.update(whole[name].numpy().tobytes())
    return digest.hexdigest()
