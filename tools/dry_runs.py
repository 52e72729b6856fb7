"""Dry runs of every shipped config on 8, 64 and 256 GPUs in generated layouts; resumable.

python tools/dry_runs.py [--part K/N] [--each N] [--workers N] [--results FILE]

A line of JSON for each: what was run, what was found, how long it took. What FILE has is skipped.
"""

import argparse
import io
import itertools
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from hp_base.errors import ConfigError
from hp_data import load_tokenizer
from hp_data.tokenizer import vocab_size_of
from hp_plan.costs.routing import parse_skew
from hp_plan.layouts.space import Axis, sample_layouts
from hp_train.cli import main as command
from hp_train.dry_run.classes import classes_of
from hp_train.verify.pairs import differing_keys
from hp_trainer.config import Config, MeshConfig, PipelineConfig, rules, to_dict
from hp_trainer.config.options import resolve, shipped, with_keys
from hp_trainer.launch.launcher import PRELOADED_FOR_TRAINING
from hp_trainer.layout.ranks import Layout
from hp_trainer.layout.schedules import count_microbatches, count_stages

GPUS = (8, 64, 256)
FORKS = multiprocessing.get_context("forkserver")
SECONDS = 300
Case = tuple[str, int, list[str]]
"""Config, devices and overrides."""
LAYERS = 2
"""Of each stage."""
MOST_LAYERS = 96
"""That a dry run may run forward and backward."""


def axes(gpus: int) -> tuple[Axis, ...]:
    """What layouts are made of: few sizes, which fill all of the devices, and every schedule."""
    sizes = tuple(n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n <= gpus)
    return (
        Axis("mesh.pp", (1, 2, 3, 4)),
        Axis("mesh.stage_tp", ((), (1, 2, 1))),
        Axis("mesh.dp_replicate", (1, 2)),
        Axis("mesh.dp_shard", sizes[1:]),
        Axis("mesh.cp", (1, 2)),
        Axis("mesh.cp_ring", (False, True)),
        Axis("mesh.tp", (1, 2)),
        Axis("mesh.ep", (1, 4, 8)),
        Axis("mesh.etp", (1, 2)),
        Axis("pipeline.schedule"),
        Axis("pipeline.stages_per_rank", (1, 2)),
        Axis("pipeline.overlap", (False, True)),
        Axis("train.recompute"),
    )


def cases(each: int) -> Iterator[Case]:
    """Yield every dry run."""
    for name in shipped():
        for gpus in GPUS:
            shipped_config = config = resolve(name, (), env={}).config
            train = replace(config.train, global_batch_size=4 * gpus, microbatch_size=1)
            config = replace(config, train=train, mesh=MeshConfig(), pipeline=PipelineConfig())
            config = replace(config, model=replace(config.model, num_layers=32, num_dense_layers=0))
            drawn = sample_layouts(
                config, 6 * each, seed=gpus, num_processes=range(gpus, gpus + 1), axes=axes(gpus)
            )
            for layout in itertools.islice(filter(is_cheap, drawn.layouts), each):
                tables = to_dict(layout)
                keys = [
                    f"{key}={tables[section][each]}".replace(" ", "")
                    for key in differing_keys(layout, shipped_config)
                    for section, each in [key.split(".")]
                    if section in ("mesh", "pipeline") or key == "train.recompute"
                ]
                keys += [
                    f"model.num_layers={LAYERS * count_stages(layout)}",
                    "model.num_dense_layers=0",
                    f"train.global_batch_size={batch_size(layout)}",
                    "train.microbatch_size=1",
                ]
                yield name, gpus, keys


def is_cheap(config: Config) -> bool:
    """Whether the layers of all classes of ranks, each with every microbatch, are few enough."""
    layers = LAYERS * count_stages(config)
    config = with_keys(
        config, {"train.global_batch_size": batch_size(config), "model.num_layers": layers}
    )
    vocab_size = vocab_size_of(load_tokenizer(config.data.tokenizer), config.model.vocab_size)
    classes = classes_of(config, parse_skew("uniform", config.model), vocab_size=vocab_size)
    return len(classes) * layers // config.mesh.pp * count_microbatches(config) <= MOST_LAYERS


def batch_size(config: Config) -> int:
    """Sequences of a step: the fewest microbatches beyond one for each pipeline rank."""
    dp = Layout.of(config.mesh).dp
    sizes = (dp * number for number in itertools.count(config.mesh.pp + 1))
    return next(
        size
        for size in sizes
        if rules.allows_pipeline(with_keys(config, {"train.global_batch_size": size}))
    )


def run_apart(case: Case) -> Any:
    """One dry run in a process of its own, a fork of one that has imported what all need."""
    receiver, sender = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=_send, args=(sender, case))
    process.start()
    sender.close()
    found = receiver.recv()
    process.join()
    return found


def _send(sender: Connection, case: Case) -> None:
    sender.send(run(case))


def run(case: Case) -> dict[str, object]:
    """One dry run, by the command, in this process."""
    name, gpus, keys = case
    began = time.monotonic()
    printed, errors = io.StringIO(), io.StringIO()
    signal.signal(signal.SIGALRM, _end)
    signal.alarm(SECONDS)
    with redirect_stdout(printed), redirect_stderr(errors):
        try:
            status = command(["dry-run", name, "--steps", "1", "--json", *keys])
        except Exception as error:  # noqa: BLE001 - told, and the next one begins
            status, errors = -1, io.StringIO(repr(error))
    signal.alarm(0)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    found = json.loads(printed.getvalue() or "{}")
    return {
        "config": name,
        "gpus": gpus,
        "keys": keys,
        "status": status,
        "error": errors.getvalue().strip().rpartition("\n")[2] if status else "",
        "problems": len(found.get("problems", ())),
        "ranks": len(found.get("ranks", ())),
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(sum(each.ru_utime + each.ru_stime for each in used), 1),
    }


def _end(*_: object) -> None:
    raise TimeoutError(f"not done after {SECONDS} s")


def main() -> int:
    """Run what is not in the results yet; 1 if anything failed that is not a refusal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="1/1", help="K/N: the Kth of N parts")
    parser.add_argument("--each", type=int, default=6, help="layouts of a config and a size")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="dry runs at a time")
    parser.add_argument("--results", type=Path, default=Path("dry-runs.jsonl"))
    options = parser.parse_args()
    part, num_parts = map(int, options.part.split("/"))
    if not 1 <= part <= num_parts:
        raise ConfigError(f"--part ({options.part}) must be like 1/3")
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    results = [json.loads(line) for line in lines]
    done = [[each["config"], each["gpus"], each["keys"]] for each in results]
    missing = (
        case
        for case in itertools.islice(cases(options.each), part - 1, None, num_parts)
        if [*case] not in done
    )
    FORKS.set_forkserver_preload([*PRELOADED_FOR_TRAINING, "hp_train.dry_run.rehearsal"])
    with ThreadPoolExecutor(options.workers) as pool, options.results.open("a") as file:
        for ended in as_completed([pool.submit(run_apart, case) for case in missing]):
            result = ended.result()
            print(json.dumps(result), file=file, flush=True)
            print(json.dumps(result), flush=True)
            results.append(result)
    good = sum(result["status"] == 0 for result in results)
    refused = sum(result["status"] == ConfigError.exit_code for result in results)
    used = sum(result["cpu_seconds"] for result in results)
    print(f"{good} of {len(results)} dry runs found nothing wrong, {refused} were refused by name")
    print(f"{used:.0f} s of CPU time")
    return int(good + refused < len(results))


if __name__ == "__main__":
    sys.exit(main())
