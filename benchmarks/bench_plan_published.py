"""`hp plan` against steps that others have published; `published_steps.toml` says which, and where.

    python benchmarks/bench_plan_published.py          # prices with the constants of the package
    python benchmarks/bench_plan_published.py --fit    # with new ones; each row left out in turn

What GPUs reach of their data sheets is fitted: `hp_plan.costs.machine.REACHED`, eight numbers. A
row that is left out is priced with the constants that the others give; a row that is kept aside is
in no fit.
"""

import argparse
import math
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hp_base.data_sheets import REACHED, SHEETS
from hp_plan import Spread, estimate
from hp_plan.costs.machine import of_sheet
from hp_trainer.config import Config
from hp_trainer.config.options import resolve

BEFORE: Mapping[str, float] = {
    "product": 0.65,
    "grouped": 0.5,
    "attention": 0.5,
    "memory": 0.8,
    "link": 0.5,
    "node link": 0.7,
    "compiled": 0.4,
    "launch seconds": 5e-6,
}
"""What one would expect without the rows. A factor of e counts as much as a row 10 % off."""
PRIOR = 0.1
STEPS = 12


@dataclass(frozen=True)
class Row:
    """A published step.

    Attributes:
        name: What it is.
        tokens: Tokens per second and GPU.
        machine: Name of its data sheet.
        config: Config that says the same.
        spread: Where experts of a token were.
        is_aside: Whether it is not fitted.
    """

    name: str
    tokens: float
    machine: str
    config: Config
    spread: Spread
    is_aside: bool

    def predicted(self, reached: Mapping[str, float]) -> float:
        """Tokens per second and GPU, by what programs reach."""
        machine = of_sheet(SHEETS[self.machine], reached)
        size = self.config.model.vocab_size
        found = estimate(self.config, machine, vocab_size=size, spread=self.spread)
        return found.tokens_per_second / self.config.world_size


def read_rows() -> list[Row]:
    """Read the published steps."""
    text = (Path(__file__).parent / "published_steps.toml").read_text()
    rows = []
    for each in tomllib.loads(text)["row"]:
        config = resolve(each["config"], each["keys"].items(), env={}).config
        spread = consecutive(config) if each.get("consecutive") else Spread()
        machine = each.get("machine", "h100")
        aside = each.get("aside", False)
        rows.append(Row(each["name"], each["tokens"], machine, config, spread, aside))
    return rows


def consecutive(config: Config) -> Spread:
    """Where experts are if token t has t k, t k + 1, ... of them: on few ranks of one node."""
    model, ranks = config.model, config.mesh.ep
    each = model.num_experts // ranks
    firsts = range(0, model.num_experts * model.top_k, model.top_k)
    on = [{(first + i) % model.num_experts // each for i in range(model.top_k)} for first in firsts]
    return Spread(ranks=statistics.fmean(map(len, on)), nodes=1.0)


def fit(rows: Sequence[Row]) -> dict[str, float]:
    """Constants that make the logarithms of all ratios small: Gauss and Newton, with a prior."""
    names = list(BEFORE)
    start = np.log([BEFORE[name] for name in names])
    most = np.array([math.log(1e-4 if name == "launch seconds" else 1.0) for name in names])

    def misses(at: np.ndarray) -> np.ndarray:
        reached = dict(zip(names, np.exp(at), strict=True))
        ratios = [math.log(row.predicted(reached) / row.tokens) for row in rows]
        return np.array([*ratios, *(PRIOR * (at - start))])

    at, now = start, misses(start)
    for _ in range(STEPS):
        slopes = np.stack(
            [(misses(at + 1e-3 * unit) - now) / 1e-3 for unit in np.eye(len(names))], axis=1
        )
        step = np.linalg.lstsq(slopes, -now, rcond=None)[0]
        for part in (1.0, 0.5, 0.25, 0.1):
            there = np.minimum(at + part * step, most)
            then = misses(there)
            if then @ then < now @ now:
                break
        else:
            break
        small = now @ now - then @ then < 1e-6
        at, now = there, then
        if small:
            break
    return dict(zip(names, map(float, np.exp(at)), strict=True))


def tell(rows: Sequence[Row], reached: Sequence[Mapping[str, float]], what: str) -> None:
    """Print a table, each row with its constants."""
    print(f"| {what} | published | predicted | ratio |\n|---|---|---|---|")
    misses = []
    for row, constants in zip(rows, reached, strict=True):
        predicted = row.predicted(constants)
        misses.append(abs(predicted / row.tokens - 1))
        ratio = predicted / row.tokens
        print(f"| {row.name} | {row.tokens:,.0f} | {predicted:,.0f} | {ratio:.2f} |")
    print(f"\nmedian {statistics.median(misses):.1%} off, worst {max(misses):.1%}\n")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fit", action="store_true", help="fit the constants anew")
    options = parser.parse_args()
    rows = read_rows()
    fitted, aside = ([row for row in rows if row.is_aside is kept] for kept in (False, True))
    reached: Mapping[str, float] = REACHED
    if options.fit:
        reached = fit(fitted)
        print(", ".join(f"{name} {value:.3g}" for name, value in reached.items()), "\n")
        left_out = [fit([other for other in fitted if other is not row]) for row in fitted]
        tell(fitted, left_out, "left out of the fit")
    tell(fitted, [reached] * len(fitted), "fitted")
    tell(aside, [reached] * len(aside), "kept aside")


if __name__ == "__main__":
    main()
