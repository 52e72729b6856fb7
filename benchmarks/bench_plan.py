"""Steps as `hp plan` predicts them at measured rates, beside steps that were trained.

Both are of this machine in this run, on the CPU with one thread per process. In each round rates
are measured anew and every layout is trained: what other programs take of the machine differs from
round to round. Printed are medians over the rounds, and pairs of layouts in the wrong order of
those that are more than a tenth apart.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path

from hp_plan import estimate
from hp_plan.layouts.measure import measure
from hp_trainer.config import Config
from hp_trainer.config.options import checked_config, resolve, with_keys
from hp_trainer.launch.launcher import run_entry

LAYOUTS: dict[str, dict[str, object]] = {
    "dp 2": {"mesh.dp_replicate": 2},
    "dp_shard 2": {"mesh.dp_shard": 2},
    "pp 2, 1f1b": {"mesh.pp": 2, "pipeline.schedule": "1f1b"},
    "pp 2, zbv": {"mesh.pp": 2, "pipeline.schedule": "zbv", "pipeline.stages_per_rank": 2},
    "ep 2": {"mesh.dp_replicate": 2, "mesh.ep": 2},
    "etp 2": {"mesh.dp_replicate": 2, "mesh.etp": 2},
    "cp 2": {"mesh.cp": 2},
    "tp 2": {"mesh.tp": 2},
}
APART = 1.1
STEPS = 6
PLAIN = {
    "mesh.gather": "stage",  # as on a CPU
    "mesh.pp": 1,
    "mesh.dp_replicate": 1,
    "mesh.ep": 1,
    "pipeline.stages_per_rank": 1,
    "train.steps": STEPS,
    "train.eval_every": 0,
    "train.save_every": 0,
    "train.sample_tokens": 0,
}


def main() -> None:
    """Measure rates and train every layout, in rounds, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    rounds = parser.parse_args().rounds
    config = checked_config(resolve("quickstart", PLAIN.items()).config, dtype="float32")
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in LAYOUTS}
    with tempfile.TemporaryDirectory(prefix="bench-plan-") as scratch:
        for number in range(rounds):
            machine, flags = measure(config)
            print(f"rates: {flags}", flush=True)
            for index, (name, keys) in enumerate(LAYOUTS.items()):
                layout = with_keys(config, keys)
                measured = step_seconds(layout, Path(scratch, f"run{number}-{index}"))
                predicted = estimate(layout, machine, vocab_size=256).seconds
                times[name].append((predicted, measured))
                print(f"{name}: {predicted * 1e3:.0f}, {measured * 1e3:.0f} ms", file=sys.stderr)
    medians = {name: _medians(pairs) for name, pairs in times.items()}
    print("\n| layout | predicted | measured | predicted / measured |\n|---|---|---|---|")
    for name, (predicted, measured, ratio) in medians.items():
        print(f"| {name} | {predicted * 1e3:.0f} ms | {measured * 1e3:.0f} ms | {ratio:.2f} |")
    for one, other in itertools.permutations(medians, 2):
        (mine, my_time, _), (theirs, their_time, _) = medians[one], medians[other]
        if my_time * APART < their_time and mine > theirs:
            print(f"{one} is faster than {other}, not slower")


def _medians(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Of what was predicted and measured in each round, and of the ratio of both."""
    ratios = [predicted / measured for predicted, measured in pairs]
    predicted, measured = (statistics.median(column) for column in zip(*pairs, strict=True))
    return predicted, measured, statistics.median(ratios)


def step_seconds(layout: Config, run_dir: Path) -> float:
    """Train; return the median seconds of a step, without the first."""
    run_dir.mkdir()
    if run_entry(layout, run_dir, entry="hp_trainer.training.train:main"):
        raise SystemExit(f"the run in {run_dir.name} failed")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    seconds: list[float] = [json.loads(line)["step_seconds"] for line in lines[1:]]
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
