"""Curves of losses as runs write them: by step, from files of several formats. No torch."""

import csv
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from hp_base.errors import DataError
from hp_base.folder import open_named, why_not

_METRICS = "metrics.jsonl"
_LONGEST_LINE = 1 << 20
"""Characters; a longer line is taken for several."""
_STEPS = ("step", "global_step", "iteration", "iter", "_step")
_LOSSES = ("loss", "train_loss", "train/loss", "lm loss", "lm_loss", "loss_metrics/global_avg_loss")
_NUMBER = r"([-+]?(?:\d[\d_,]*\.?\d*(?:[eE][-+]?\d+)?|nan|inf))"
_LINE = re.compile(rf"(?:step|iteration|iter)\W*{_NUMBER}.*?\bloss\W*{_NUMBER}", re.IGNORECASE)
_OBJECTS, _ROWS = (".jsonl", ".json"), (".csv", ".tsv")
"""Ends of names of files with an object in each line, and of tables."""

_Pair = tuple[int, float]
"""A step and its loss."""


def read_curve(path: Path, pattern: str | None = None) -> dict[int, float]:
    """Read the loss after each step; of a step that was run again the last.

    Args:
        path: A run directory of hp-train, or a file: `.jsonl`, `.csv`, or a log.
        pattern: Regular expression with groups ``step`` and ``loss`` (or the first two), searched
            in each line; where it fits none, or None: as the file's name says, a log by
            ``step N ... loss X``.

    Raises:
        DataError: When it cannot be read, or has no step with a loss.
    """
    file = path / _METRICS if path.is_dir() else path
    found: Iterator[_Pair | None]
    try:
        with os.fdopen(open_named(file), encoding="utf-8", errors="replace", newline="") as opened:
            lines = iter(partial(opened.readline, _LONGEST_LINE), "")
            if pattern is not None:
                found = _matched(lines, _compiled(pattern))
            elif file.suffix in _OBJECTS:
                found = _of_objects(lines, file)
            elif file.suffix in _ROWS:
                found = map(_named, csv.DictReader(lines, delimiter="\t,"[file.suffix == ".csv"]))
            else:
                found = _matched(lines, _LINE)
            curve = dict(pair for pair in found if pair is not None)
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{file} must be a curve of losses: {why_not(error)}") from None
    if not curve and pattern is not None and file.suffix in _OBJECTS + _ROWS:
        return read_curve(path)  # the pattern is of a log beside it
    if not curve:
        raise DataError(f"{file} must have steps with losses, and has none that can be told")
    return dict(sorted(curve.items()))


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        found = re.compile(pattern)
    except re.error as error:
        raise DataError(f"--pattern must be a regular expression: {error}") from None
    if found.groups < 2:
        raise DataError("--pattern must have two groups: step and loss")
    return found


def _matched(lines: Iterable[str], pattern: re.Pattern[str]) -> Iterator[_Pair | None]:
    names = pattern.groupindex
    for line in lines:
        match = pattern.search(line)
        if match is not None:
            yield _pair(match[names.get("step", 1)], match[names.get("loss", 2)])


def _of_objects(lines: Iterable[str], file: Path) -> Iterator[_Pair | None]:
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n") or not line.strip():
            continue  # the writer was killed
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            raise DataError(f"{file}: line {number} must be JSON") from None
        if isinstance(values, dict):
            yield _named(values)


def _named(values: Mapping[str, object]) -> _Pair | None:
    step = next((values[name] for name in _STEPS if values.get(name) is not None), None)
    loss = next((values[name] for name in _LOSSES if values.get(name) is not None), None)
    return None if step is None or loss is None else _pair(step, loss)


def _pair(step: object, loss: object) -> _Pair | None:
    try:
        place = float(str(step).replace(",", "").replace("_", ""))
        value = float(str(loss).replace(",", "").replace("_", ""))
    except ValueError:
        return None
    return (int(place), value) if math.isfinite(place) else None
