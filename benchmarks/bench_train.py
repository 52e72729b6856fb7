"""What four processes pay for their parallelism: hp-train, one process, and torch alone.

Two models in two layouts each, fp32, 4 processes with 1 thread, 512 tokens per rank and microbatch.
hp-train trains on the same batches in one process, which sends nothing, and torch alone trains the
same shapes with FSDP2 and `torch.distributed.pipelining` (plain_torch.py). All take turns, so that
whatever else the machine does hits all of them. CPU seconds are those of all processes that a
command has started, launchers included, between the lines of two steps; they are what getrusage
adds up at the end, without the start. They hardly depend on other programs; wall seconds do.

    python benchmarks/bench_train.py
    python benchmarks/bench_train.py --rounds 1 --only deepseek
    python benchmarks/bench_train.py --rounds 5 --against ../before  # another checkout takes turns
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
FIRST_STEP = 2  # that is counted from: those before import, allocate and connect
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Case:
    """One model in one layout.

    Attributes:
        model: Its shape, a file in train_shapes.
        layout: Name in plain_torch.py.
        settings: The same for hp-train.
        sequences: Of a step, 256 tokens each.
        steps: How many are counted.
    """

    model: str
    layout: str
    settings: tuple[str, ...]
    sequences: int
    steps: int

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.sequences * 256


CASES = (
    Case("llama3", "fsdp4", ("mesh.dp_shard=4",), 8, 20),
    Case("llama3", "pp2_dp2", ("mesh.pp=2", "mesh.dp_shard=2", "pipeline.schedule=1f1b"), 16, 12),
    Case("deepseek_v3", "fsdp4_ep4", ("mesh.dp_shard=4", "mesh.ep=4"), 8, 5),
    Case(
        "deepseek_v3",
        "pp2_ep2",
        ("mesh.pp=2", "mesh.dp_shard=2", "mesh.ep=2", "pipeline.stages_per_rank=2"),
        16,
        3,
    ),
)


@dataclass(frozen=True)
class Run:
    """What one run showed.

    Attributes:
        tokens_per_cpu_second: After the start.
        start_seconds: From the command to the line of the first step.
        peak_mib: Largest resident set of any rank.
    """

    tokens_per_cpu_second: float
    start_seconds: float
    peak_mib: float


def hp_train(case: Case, directory: str, *, settings: Sequence[str]) -> list[str]:
    """Return the command of a run of hp-train."""
    return [
        *(sys.executable, "-m", "hp_train", "train"),
        str(HERE / "train_shapes" / f"{case.model}.toml"),
        f"train.steps={FIRST_STEP + case.steps}",
        f"train.global_batch_size={case.sequences}",
        f"run.output_dir={directory}",
        "run.name=bench",
        *settings,
    ]


def plain_torch(case: Case) -> list[str]:
    """Return the command of a run of torch alone."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
        str(HERE / "plain_torch.py"),
        *(case.model, case.layout, "--steps", str(FIRST_STEP + case.steps)),
    ]


def cpu_seconds(root: int) -> float:
    """CPU seconds so far of a process and all that descend from it."""
    ticks, parents = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        # User, system, and both of children that have ended.
        ticks[int(path.parent.name)] = sum(map(int, fields[11:15]))
        parents[int(path.parent.name)] = int(fields[1])
    family, grew = {root}, True
    while grew:
        children = {pid for pid, parent in parents.items() if parent in family} - family
        grew = bool(children)
        family |= children
    return sum(ticks.get(pid, 0) for pid in family) / TICKS


def sources(checkout: Path) -> dict[str, str]:
    """Return the environment in which a checkout's packages are imported, and no others."""
    return {"PYTHONPATH": os.pathsep.join(map(str, checkout.resolve().glob("packages/*/src")))}


def run(
    case: Case, command: list[str], metrics: Path, variables: Mapping[str, str] | None = None
) -> Run:
    """Run a command that prints a line per step, and tells its peak memory there or in a file."""
    began, marks = time.monotonic(), {}
    start_seconds, peak = 0.0, 0.0
    # Where it is set, every process would compile torch's sources again.
    always = {"PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": "1"}
    env = {**os.environ, **always, **(variables or {})}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(  # noqa: S603  # our own
            command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            found = re.match(r'(?:step +|\{"step": )(\d+)', line)
            if found is None:
                continue
            step = int(found.group(1))
            if step == 1:
                start_seconds = time.monotonic() - began
            if step in (FIRST_STEP, FIRST_STEP + case.steps):
                marks[step] = cpu_seconds(process.pid)
            if line.startswith("{"):
                peak = json.loads(line)["peak_memory_mib"]
        # Torch aborts now and then while it takes its groups apart: by then all has been measured.
        if process.wait() and FIRST_STEP + case.steps not in marks:
            errors.seek(0)
            raise RuntimeError(f"{' '.join(command)}: {process.returncode}\n{errors.read()}")
    if metrics.exists():
        last = json.loads(metrics.read_text().splitlines()[-1])
        peak = last["peak_memory_bytes"] / 2**20
    seconds = marks[FIRST_STEP + case.steps] - marks[FIRST_STEP]
    return Run(case.tokens * case.steps / seconds, start_seconds, peak)


def one_round(case: Case, against: Path | None) -> dict[str, Run]:
    """Run all three, or four with another checkout, one after the other."""
    runs = [("hp", case.settings, HERE.parent), ("one", (), HERE.parent)]
    if against is not None:
        runs.insert(1, ("before", case.settings, against))
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, settings, checkout in runs:
            place = str(Path(directory, name))
            command = hp_train(case, place, settings=settings)
            metrics = Path(place, "bench", "metrics.jsonl")
            found[name] = run(case, command, metrics, sources(checkout))
        found["torch"] = run(case, plain_torch(case), Path(directory, "none"))
    return found


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Return median and range."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def row(case: Case, rounds: Sequence[dict[str, Run]]) -> str:
    """Return a row of the table; ratios are taken within a round."""

    def rates(name: str) -> list[float]:
        return [runs[name].tokens_per_cpu_second for runs in rounds]

    def ratios(other: str) -> list[float]:
        return [a / b for a, b in zip(rates("hp"), rates(other), strict=True)]

    cells = [f"{case.model} {case.layout}", *(spread(rates(name)) for name in rounds[0])]
    cells += [spread(ratios(other), 2) for other in rounds[0] if other != "hp"]
    for name in ("hp", "torch"):
        cells.append(f"{max(runs[name].peak_mib for runs in rounds):.0f}")
        cells.append(spread([runs[name].start_seconds for runs in rounds], 1))
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print one table: tokens per CPU second, ratios, memory of a rank, seconds to a loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="part of the name of a case")
    parser.add_argument("--against", type=Path, help="checkout whose hp-train takes turns")
    options = parser.parse_args()
    cases = [case for case in CASES if options.only in f"{case.model} {case.layout}"]
    found: dict[Case, list[dict[str, Run]]] = {case: [] for case in cases}
    for _ in range(options.rounds):
        for case in cases:
            found[case].append(one_round(case, options.against))
            print(row(case, found[case]), file=sys.stderr, flush=True)
    names = list(next(iter(found.values()))[0])
    ratios = [f"hp / {name}" for name in names[1:]]
    heads = ["case", *names, *ratios, "MiB hp", "s", "MiB torch", "s"]
    print(f"| {' | '.join(heads)} |")
    print("|" + "---|" * len(heads))
    for case, rounds in found.items():
        print(row(case, rounds))


if __name__ == "__main__":
    main()
