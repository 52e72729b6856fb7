"""One state through many layouts: saved under each, loaded under the next, the same bits."""

import hashlib
import itertools
import time
from pathlib import Path
from uuid import uuid4

import msgspec
import torch.distributed as dist
from torch import Tensor

from hp_platform import RankInfo, initialize
from hp_platform.testing import run_distributed
from hp_train.config import Config
from hp_train.data import load_tokenizer, prepare
from hp_train.options import resolve
from hp_train.space import AXES, sample_layouts
from hp_train.train import Trainer
from integration_tests.layouts import worker_of
from integration_tests.reliability.outcome import Outcome

MODEL = Path(__file__).parent.parent / "verify.toml"
_STEPS = 2
_WITHOUT_EFFECT = (
    "mesh.cp_heads",
    "mesh.cp_ring",
    "pipeline.overlap",
    "train.microbatch_size",
    "train.recompute",
)
"""What does not change what a rank holds."""


def run(count: int, folder: Path, *, seed: int, data: Path) -> Outcome:
    """Train two steps, then load and save under `count` layouts, one after the other."""
    began = time.monotonic()
    config = resolve(str(MODEL), [("run.output_dir", str(folder))], env={}).config
    axes = [axis for axis in AXES if axis.key not in _WITHOUT_EFFECT]
    sample = sample_layouts(config, count + 1, seed=seed, num_processes=range(1, 5), axes=axes)
    run_dir = folder / "reloads"
    prepare(
        run_dir / "data",
        paths=[str(data)],
        tokenizer=load_tokenizer(""),
        eval_fraction=config.data.eval_fraction,
    )
    failures = []
    expected = ""
    for number, layout in enumerate(sample.layouts):
        address = f"file://{run_dir}/rendezvous-{uuid4().hex}"
        try:
            found = run_distributed(
                _rank,
                msgspec.json.encode(layout),
                run_dir,
                address,
                world_size=layout.world_size,
                timeout=180,
            )
        except RuntimeError as error:
            failures.append(f"layout {number} ({layout.mesh}), seed {seed}: {error}")
            continue
        expected = expected or found[0]
        if set(found) != {expected}:
            failures.append(f"layout {number} ({layout.mesh}), seed {seed}: other bits")
    notes = [f"{sample.num_covered} of {sample.num_pairs} pairs of layout choices"]
    return Outcome("reloads", count, failures, time.monotonic() - began, notes)


def _rank(encoded: bytes, run_dir: Path, address: str) -> str:
    """Load, or train if there is nothing to load; save; digest of the whole state."""
    config = msgspec.json.decode(encoded, type=Config)
    info = RankInfo.from_env()
    assert info is not None
    runtime = initialize(info, device_type="cpu", init_method=address)
    trainer = Trainer(config, worker_of(info, run_dir), runtime, load_tokenizer(""))
    trainer.resume()
    while trainer.step < _STEPS:
        trainer.train_step()
    digest = _digest(trainer)
    trainer.save()
    trainer.close()
    return digest


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
