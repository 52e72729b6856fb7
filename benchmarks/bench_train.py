"""CPU seconds that a training step costs: the quickstart's four processes against one.

Both train the quickstart model on the same batches, in turn. CPU seconds of all ranks say what the
parallel run pays for its messages; they hardly depend on what else the machine does, wall seconds
do. The first steps, which import and allocate, are left out.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TOKENS_PER_STEP = 32 * 128
STEPS, LEFT_OUT = 25, 5
REPEATS = 3
LAYOUTS = {
    "one process": ["mesh.pp=1", "mesh.dp_replicate=1", "mesh.ep=1", "pipeline.stages_per_rank=1"],
    "pp 2 x dp 2 (ep 2)": [],
}


def cpu_seconds_per_step(layout: list[str]) -> float:
    """Return the median over the steps of a run, summed over its ranks."""
    with tempfile.TemporaryDirectory() as directory:
        settings = [
            f"train.steps={STEPS}",
            "train.warmup_steps=1",
            "train.eval_every=0",
            "train.save_every=0",
            "train.sample_tokens=0",
            "launch.threads_per_process=1",
            f"run.output_dir={directory}",
            "run.name=bench",
            *layout,
        ]
        command = [sys.executable, "-m", "hp_train", "train", *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603  # our own
        lines = Path(directory, "bench", "metrics.jsonl").read_text().splitlines()
    seconds: list[float] = [json.loads(line)["cpu_seconds"] for line in lines[LEFT_OUT:]]
    return statistics.median(seconds)


def main() -> None:
    """Print one line per layout, and how they compare."""
    runs: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    for _ in range(REPEATS):
        for name, layout in LAYOUTS.items():
            runs[name].append(cpu_seconds_per_step(layout))
    one, four = (statistics.median(values) for values in runs.values())
    for name, seconds in zip(LAYOUTS, (one, four), strict=True):
        rate = TOKENS_PER_STEP / seconds
        print(f"{name:<20} {seconds:.3f} CPU s per step, {rate:,.0f} tokens per CPU second")
    print(f"efficiency of four processes against one: {one / four:.2f}")


if __name__ == "__main__":
    main()
