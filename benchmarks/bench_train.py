"""CPU seconds that a training step costs: the quickstart's four processes against one.

Both train the quickstart model on the same batches. Starting up is taken out by differencing two
run lengths. CPU seconds of all processes (getrusage) say what the parallel run pays for its
messages; they hardly depend on what else the machine does, wall seconds do.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile

TOKENS_PER_STEP = 32 * 128
SHORT, LONG = 5, 35
REPEATS = 3
LAYOUTS = {
    "one process": ["mesh.pp=1", "mesh.dp_replicate=1", "mesh.ep=1", "pipeline.stages_per_rank=1"],
    "pp 2 x dp 2 (ep 2)": [],
}


def cpu_seconds(steps: int, layout: list[str], directory: str) -> float:
    """Return user and system seconds of `hp train` and all its processes."""
    settings = [
        f"train.steps={steps}",
        "train.warmup_steps=1",
        "train.eval_every=0",
        "train.sample_tokens=0",
        "train.log_every=1000",
        "launch.threads_per_process=1",
        f"run.output_dir={directory}",
        *layout,
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "hp_train", "train", *settings]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603  # our own
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print one line per layout, and how they compare."""
    per_step: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(REPEATS):
            for name, layout in LAYOUTS.items():
                short, long = (cpu_seconds(n, layout, directory) for n in (SHORT, LONG))
                per_step[name].append((long - short) / (LONG - SHORT))
    medians = {name: statistics.median(values) for name, values in per_step.items()}
    for name, seconds in medians.items():
        rate = TOKENS_PER_STEP / seconds
        print(f"{name:<20} {seconds:.3f} CPU s per step, {rate:,.0f} tokens per CPU second")
    one, four = medians.values()
    print(f"efficiency of four processes against one: {one / four:.2f}")


if __name__ == "__main__":
    main()
