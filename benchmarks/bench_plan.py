"""Steps as `hp plan` predicts them at measured rates, beside steps that were trained.

Both are of this machine in this run, on the CPU with one thread per process. Where other programs
share the machine, the ratio between layouts says more than any of the times.
"""

import json
import statistics
import tempfile
from pathlib import Path

from hp_train.config import Config
from hp_train.config.options import resolve
from hp_train.config.space import with_keys
from hp_train.launch.launcher import run_entry
from hp_train.plan import estimate
from hp_train.plan.measure import measure
from hp_train.verify.pairs import checked_config

LAYOUTS: dict[str, dict[str, object]] = {
    "dp 2": {"mesh.dp_replicate": 2},
    "dp_shard 2": {"mesh.dp_shard": 2},
    "pp 2, 1f1b": {"mesh.pp": 2, "pipeline.schedule": "1f1b"},
    "pp 2, zbv": {"mesh.pp": 2, "pipeline.schedule": "zbv", "pipeline.stages_per_rank": 2},
    "ep 2": {"mesh.dp_replicate": 2, "mesh.ep": 2},
    "tp 2": {"mesh.tp": 2},
}
STEPS = 6
PLAIN = {
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
    """Measure rates, train every layout, and print one table."""
    config = checked_config(resolve("quickstart", PLAIN.items()).config, dtype="float32")
    machine, flags = measure(config)
    rows: list[str] = []
    with tempfile.TemporaryDirectory(prefix="bench-plan-") as scratch:
        for name, keys in LAYOUTS.items():
            layout = with_keys(config, keys)
            measured = step_seconds(layout, Path(scratch, f"run{len(rows)}"))
            predicted = estimate(layout, machine, vocab_size=256).seconds
            times = f"{predicted * 1e3:.0f} ms | {measured * 1e3:.0f} ms"
            rows.append(f"| {name} | {times} | {predicted / measured:.2f} |")
    print(f"rates: {flags}\n")
    print("| layout | predicted | measured | predicted / measured |\n|---|---|---|---|")
    print("\n".join(rows))


def step_seconds(layout: Config, run_dir: Path) -> float:
    """Train; return the median seconds of a step, without the first."""
    run_dir.mkdir()
    if run_entry(layout, run_dir, entry="hp_train.training.train:main"):
        raise SystemExit(f"the run in {run_dir.name} failed")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    seconds: list[float] = [json.loads(line)["step_seconds"] for line in lines[1:]]
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
