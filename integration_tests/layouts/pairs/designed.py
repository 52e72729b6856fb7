"""Comparisons of configs that have many pairs of a feature of a model and a setting each.

`covering` finds them. Each config is compared with one process, and that with the oracle where it
knows such a training. One that fails is cut down: changes of the base that it consists of are taken
out, half of them, then a quarter, as long as what is left fails, until the pair is named.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hp_base.errors import ConfigError
from hp_train.verify.program import TRAINER, Program
from hp_train.verify.runs import Runs, Verdict
from hp_trainer.config import Config, rules
from hp_trainer.config.options import one_process, with_keys
from integration_tests.layouts.pairs.covering import Design, Setting, changes


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a config, as a line of a file of results.

    Attributes:
        config: Overrides of the base.
        ok: Whether it is equal to one process, and that to the oracle.
        results: Comparisons in words.
        seconds: Seconds that they took.
        named: Of a config that is not equal, the fewest overrides that are not; empty: not looked
            for.
    """

    config: list[str]
    ok: bool
    results: list[str]
    seconds: float
    named: list[str] = []

    def __str__(self) -> str:
        what = "\n".join([" ".join(self.config), *(f"  {each}" for each in self.results)])
        named = f"\n  the fewest that differ: {' '.join(self.named)}" if self.named else ""
        return f"{'ok  ' if self.ok else 'FAIL'} {self.seconds:5.1f} s  {what}{named}"


def read_rows(results: Path | None) -> dict[tuple[str, ...], Row]:
    """Return the rows of a file of results, by their overrides; of several of one config the last.

    Raises:
        ConfigError: When the file has other lines.
    """
    if results is None or not results.exists():
        return {}
    try:
        rows = [msgspec.json.decode(line, type=Row) for line in results.read_bytes().splitlines()]
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--results ({results}) must be of this command: {error}") from None
    return {tuple(row.config): row for row in rows}


@dataclass(frozen=True)
class Designed:
    """Compares the configs of a design.

    Attributes:
        design: The configs.
        program: Program of each run.
        scratch: An empty folder.
        job: ``module:callable``, see `hp_train.verify.rank.Build`.
        results: File that rows are added to; what it has as equal is not run again.
    """

    design: Design
    program: Program
    scratch: Path
    job: str = TRAINER
    results: Path | None = None

    def rows(self, part: int = 1, num_parts: int = 1) -> Iterator[tuple[int, Row]]:
        """Yield index and row of the configs of a part, those that are known to be equal too."""
        known = read_rows(self.results)
        for index, config in enumerate(self.design.configs):
            if index % num_parts != part - 1:
                continue
            name = overrides(changes(config, self.design.base))
            row = known.get(tuple(name))
            if row is None or not row.ok:
                row = self._row(config, name)
                if self.results is not None:
                    with self.results.open("ab") as file:
                        file.write(msgspec.json.encode(row) + b"\n")
            yield index, row

    def _row(self, config: Config, name: list[str]) -> Row:
        began = time.monotonic()
        verdicts = self.judge(config)
        ok = all(verdict.ok for verdict in verdicts)
        named = [] if ok else overrides(self.cut_down(config))
        return Row(
            config=name,
            ok=ok,
            results=list(map(_described, verdicts)),
            seconds=round(time.monotonic() - began, 1),
            named=named,
        )

    def judge(self, config: Config) -> list[Verdict]:
        """Compare a config with one process, and that with the oracle."""
        folder = self.scratch / f"config-{len(list(self.scratch.iterdir())):04d}"
        folder.mkdir()
        alone = one_process(with_keys(config, {"train.recompute": "none"}))
        runs = Runs(folder, base=alone, program=self.program, job=self.job)
        verdicts = [runs.judge(config, alone)] if config != alone else []
        if config.data.packing == "stream":
            verdicts.insert(0, runs.judge(alone, None))
        if all(verdict.ok for verdict in verdicts):
            shutil.rmtree(folder)
        return verdicts

    def cut_down(self, config: Config) -> list[Setting]:
        """Return the fewest changes of the base that still fail."""

        def fails(kept: Sequence[Setting]) -> bool:
            found = with_keys(self.design.base, {each.key: each.value for each in kept})
            if next(rules.problems(found), ""):
                return False
            return not all(verdict.ok for verdict in self.judge(found))

        return fewest(changes(config, self.design.base), fails)


def fewest(those: Sequence[Setting], fails: Callable[[Sequence[Setting]], bool]) -> list[Setting]:
    """Leave out what need not be there for a failure: halves, then smaller parts, then single ones.

    Args:
        those: They fail together.
        fails: Whether some of them do.
    """
    kept, size = list(those), len(those)
    while size > 1:
        size = -(-size // 2)
        start = 0
        while start < len(kept):
            left = kept[:start] + kept[start + size :]
            if len(kept) > 1 and fails(left):
                kept = left
            else:
                start += size
    return kept


def overrides(those: Sequence[Setting]) -> list[str]:
    """Return settings as they are given to a command."""
    return list(map(str, those))


def _described(verdict: Verdict) -> str:
    result = verdict.comparison.summary() if verdict.comparison else verdict.problem
    first = "" if verdict.comparison is None or verdict.ok else f", first at {_first(verdict)}"
    return f"{verdict.layout} against {verdict.against}: {result}{first}"


def _first(verdict: Verdict) -> str:
    comparison = verdict.comparison
    assert comparison is not None
    return str(comparison.first or comparison.flaws[0])
