"""Planned steps that run, beside static packs of the same documents, and beside what was planned.

    python benchmarks/bench_step_plan_real.py real       # two ranks, each on a core of its own
    python benchmarks/bench_step_plan_real.py timed      # four ranks whose layers sleep

Static packs are those of best fit, under 1F1B, shared by head and tail of each; planned steps are
of the same documents. Steps of both alternate in the same processes. `real` learns what tokens,
pairs and microbatches take from a few steps, plans with that, and says how far the pipeline's time
is from the plan. `timed` replaces the layers' compute by sleeps of a cost model: a forward and both
halves of a backward take what it says of the tokens and pairs of a rank; exchanges of keys and of
experts' rows, messages between stages and all else is real, and what that takes by itself, on as
many cores as there are, is learned from steps that do not sleep, and planned with.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hp_base.signals import StopFlag
from hp_context import Documents
from hp_data import load_tokenizer
from hp_data.preparation import prepare
from hp_packing import StageCosts, StepCosts
from hp_platform import RankInfo, initialize, shutdown, submit_weight_grad
from hp_platform.testing import run_distributed
from hp_schedule import MetaStepType
from hp_trainer.config import Config
from hp_trainer.config.options import build
from hp_trainer.launch.heartbeats import Heartbeats
from hp_trainer.launch.task import Worker
from hp_trainer.model import Microbatch
from hp_trainer.model.block import Block
from hp_trainer.training.trainer import Trainer

REAL: Mapping[str, object] = {
    "model.dim": 256,
    "model.num_layers": 6,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.num_experts": 0,
    "model.dense_hidden": 768,
    "data.seq_len": 2048,
}
TIMED: Mapping[str, object] = {
    "model.dim": 16,
    "model.num_layers": 2,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.num_experts": 4,
    "model.num_dense_layers": 0,
    "model.top_k": 2,
    "model.expert_hidden": 8,
    "data.seq_len": 128,
}
COMMON: Mapping[str, object] = {
    "data.eval_fraction": 0.05,
    "train.steps": 1000,
    "train.microbatch_size": 1,
    "train.global_batch_size": 8,
    "train.sample_tokens": 0,
    "train.eval_every": 0,
}
LAYOUTS: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "real": {
        "cp 2": {"mesh.cp": 2, "mesh.cp_heads": 1},
        "pp 2": {"mesh.pp": 2, "pipeline.schedule": "1f1b"},
    },
    "timed": {
        "pp 2 x cp 2, ep 2": {
            "mesh.pp": 2,
            "mesh.cp": 2,
            "mesh.cp_heads": 1,
            "mesh.ep": 2,
            "pipeline.schedule": "1f1b",
        },
        "cp 4, ep 4": {"mesh.cp": 4, "mesh.cp_heads": 1, "mesh.ep": 4},
    },
}
_LEARNING = 3
"""Steps that costs are learned from."""


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=LAYOUTS)
    parser.add_argument("--only", help="one of the layouts")
    parser.add_argument("--steps", type=int, default=6, help="of each, in alternation")
    parser.add_argument("--seconds", type=float, default=6.0, help="pure work of a timed step")
    options = parser.parse_args()
    print("| layout | static, ms | planned, ms | faster | pipeline, ms | predicted, ms | off |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name, layout in LAYOUTS[options.kind].items():
        if options.only in (None, name):
            print(f"| {name} | {_row(options, layout)} |", flush=True)


def _row(options: argparse.Namespace, layout: Mapping[str, object]) -> str:
    with tempfile.TemporaryDirectory(prefix="hp-bench-") as scratch:
        folder = Path(scratch)
        is_timed = options.kind == "timed"
        shape = TIMED if is_timed else REAL
        values = {**COMMON, **shape, **layout}
        longest = int(str(shape["data.seq_len"]))
        paths = [str(_write_documents(folder / "documents.jsonl", longest))]
        tokenizer = load_tokenizer("")
        prepare(folder / "data", paths=paths, tokenizer=tokenizer, eval_fraction=0.05)
        run = partial(
            _rank,
            values,
            str(folder),
            options.steps,
            seconds=options.seconds if is_timed else 0.0,
        )
        size = build({**values, "data.paths": ()}).world_size
        found = run_distributed(run, world_size=size, timeout=600)
    static, planned, pipeline, predicted = found[0]
    return (
        f"{static * 1e3:.0f} | {planned * 1e3:.0f} | {static / planned:.2f} x | "
        f"{pipeline * 1e3:.0f} | {predicted * 1e3:.0f} | {pipeline / predicted - 1:+.0%}"
    )


def _write_documents(path: Path, longest: int) -> Path:
    """One in 20 documents is as long as a sequence, the others have a sixteenth on average."""
    rng = Random(3)  # noqa: S311 - nothing is secret
    with path.open("w") as file:
        for _ in range(1500):
            mean = longest / 16
            size = longest - 1 if rng.random() < 0.05 else rng.lognormvariate(0, 0.7) * mean
            letters = rng.choices("abcdefgh ", k=max(1, min(int(size), longest - 1)))
            file.write(json.dumps({"text": "".join(letters)}) + "\n")
    return path


def _rank(
    values: Mapping[str, object], folder: str, steps: int, *, seconds: float
) -> tuple[float, float, float, float]:
    """Train both ways in turn; medians of a step of each, of the pipeline and of its plan."""
    info = RankInfo.from_env()
    assert info is not None
    os.sched_setaffinity(0, {info.rank % (os.cpu_count() or 1)} if not seconds else {0, 1})
    runtime = initialize(info)
    make = partial(_trainer, values, Path(folder), info, runtime)
    costs = _learned(make("planned"))
    if seconds:
        slept = _timed_costs(values, seconds)
        costs = {name: costs[name] + slept.get(name, 0.0) for name in costs}
    path = Path(folder) / "costs.toml"
    if not info.rank:  # least squares differ in the last bit between processes
        path.write_text("".join(f"{name} = {value!r}\n" for name, value in costs.items()))
    dist.barrier()
    static, planned = make("best_fit"), make("planned", plan_costs=str(path))
    if seconds:
        for trainer in (static, planned):
            _let_sleep(trainer, StepCosts.equal(token=slept["token"], pair=slept["pair"]).stages[0])
    took: dict[str, list[float]] = {"static": [], "planned": [], "pipeline": [], "predicted": []}
    for step in range(steps + 1):
        for name, trainer in (("static", static), ("planned", planned)):
            metrics, _ = trainer.train_step()
            if not step:  # warms up
                continue
            took[name].append(metrics.step_seconds)
            if trainer is planned:
                took["pipeline"].append(_largest(_length(trainer)))
                took["predicted"].append(metrics.planned_seconds or 0.0)
    shutdown()
    static_, planned_, pipeline, predicted = (median(each) for each in took.values())
    return static_, planned_, pipeline, predicted


def _learned(trainer: _Trainer) -> dict[str, float]:
    """What a stage costs, by a few steps."""
    observed: list[list[float]] = []
    for step in range(1 + _LEARNING):
        trainer.train_step()
        if step:  # the first one warms up
            observed += _observed(trainer)
    trainer.close_planning()
    return _fitted(observed)


class _Trainer(Trainer):
    """Can stop to plan ahead."""

    def close_planning(self) -> None:
        """Plan nothing more."""
        if self.planning is not None:
            self.planning.close()


def _trainer(
    values: Mapping[str, object],
    folder: Path,
    info: RankInfo,
    runtime: Any,
    packing: str,
    **data: str,
) -> _Trainer:
    given = {f"data.{key}": value for key, value in data.items()}
    config: Config = build({**values, **given, "data.packing": packing})
    run_dir = folder / f"{packing}-{len(data)}"
    run_dir.mkdir(exist_ok=True)
    beats = Heartbeats.create(run_dir / f"heartbeats-{info.rank}", num_ranks=info.world_size)
    worker = Worker(
        info=info, run_dir=run_dir, heartbeats=beats, stop=StopFlag(), data=folder / "data"
    )
    return _Trainer(config, worker, runtime, load_tokenizer(""))


def _length(trainer: Trainer) -> float:
    """Seconds between the first and the last thing that this rank did in the last step."""
    spans = [*trainer.timeline]
    return float(max(span.end for span in spans) - min(span.start for span in spans))


def _largest(value: float) -> float:
    found = torch.tensor(value)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _work(microbatch: Microbatch) -> tuple[int, float]:
    """Positions of this rank in a microbatch, and pairs of one of them and a key before it."""
    positions = microbatch.positions
    assert positions is not None
    if microbatch.balanced is not None:  # they count within documents
        return len(positions), float((positions + 1).sum())
    lengths: Sequence[int] = ()
    if microbatch.documents is not None:
        (mask,) = microbatch.documents
        assert isinstance(mask, Documents)
        lengths = mask.lengths
    starts = [0, *accumulate(lengths)]
    places = positions.tolist()
    before = [starts[bisect_right(starts, place) - 1] for place in places]
    return len(places), float(sum(places) - sum(before) + len(places))


def _observed(trainer: Trainer) -> list[list[float]]:
    """Tokens, pairs and seconds of each microbatch on each rank, of the last step; on all ranks."""
    took: dict[int, float] = {}
    for span in trainer.timeline:
        if span.step.type in (
            *(MetaStepType.FWD, MetaStepType.BWD),
            *(MetaStepType.BWD_INPUT, MetaStepType.BWD_WEIGHT),
        ):
            index = span.step.microbatch_index
            assert index is not None
            took[index] = took.get(index, 0.0) + span.end - span.start
    assert trainer.planned is not None
    share = trainer.batches.planned(trainer.data, trainer.planned, step=0)
    works = [_work(each["microbatch"]) for each in share.kwargs]
    mine = [[*works[index], seconds] for index, seconds in sorted(took.items())]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return [row for rows in everyone for row in rows]


def _fitted(observed: Sequence[Sequence[float]]) -> dict[str, float]:
    """Costs with which the plan takes what was observed, by least squares; none is negative.

    A microbatch of T tokens and P pairs takes 3 T token + 3.5 P pair + 2 microbatch, see `Seconds`.
    """
    rows = torch.tensor(observed, dtype=torch.float64)
    terms = torch.stack((3 * rows[:, 0], 3.5 * rows[:, 1], torch.full_like(rows[:, 0], 2)), dim=1)
    relative = terms / rows[:, 2:]
    used = [0, 1, 2]
    while True:
        found = torch.linalg.lstsq(relative[:, used], torch.ones(len(rows), 1).double()).solution
        if (found >= 0).all():
            break
        used.remove(used[int(found[:, 0].argmin())])
    values = dict(zip(used, found[:, 0].tolist(), strict=True))
    names = ("token", "pair", "microbatch")
    return {name: values.get(index, 0.0) for index, name in enumerate(names)}


def _timed_costs(values: Mapping[str, object], seconds: float) -> dict[str, float]:
    """So that a step is about so long, half of it for pairs where documents are long."""
    longest, size = int(str(values["data.seq_len"])), 8
    config = build({**values})
    tokens = size * longest / (config.mesh.cp * config.mesh.pp)
    pair = seconds / tokens / (3 * longest / 8 + 3.5 * longest / 6)
    return {"token": longest / 8 * pair, "pair": pair}


class _Asleep(torch.autograd.Function):
    """Sleeps in forward and in both halves of backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, took: tuple[float, float, float]) -> Tensor:
        ctx.weight, ctx.took = weight, took
        time.sleep(took[0])
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        weight, (_, of_input, of_weight) = ctx.weight, ctx.took
        time.sleep(of_input)

        def gradient() -> Tensor:
            time.sleep(of_weight)
            return torch.zeros_like(weight)

        return grads[0], submit_weight_grad(weight, gradient), None


@dataclass(frozen=True)
class _Sleeper:
    """Lets a layer take what the costs say; real compute is too little to count."""

    costs: StageCosts
    layers: int

    def __call__(self, block: nn.Module, args: Any, kwargs: Mapping[str, Any], y: Tensor) -> Tensor:
        del args
        assert isinstance(block, Block)
        tokens, pairs = _work(kwargs["microbatch"])
        took = [each / self.layers for each in self.costs.pure(tokens, pairs)]
        asleep: Any = _Asleep
        found: Tensor = asleep.apply(y, block.attention_norm.weight, tuple(took))
        return found


def _let_sleep(trainer: Trainer, costs: StageCosts) -> None:
    for stage in trainer.pipeline.modules.values():
        sleeper = _Sleeper(costs, len(stage.layers))
        for block in stage.layers.values():
            block.register_forward_hook(sleeper, with_kwargs=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
