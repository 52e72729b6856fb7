"""A pytest plugin that tells `sitecustomize.py` which test runs, and writes how long each took."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

_FOLDER = Path(os.environ["HP_TEST_MAP"])
_NUMBERS: dict[str, int] = {}
_SECONDS: dict[str, float] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Give a test its number, under which all processes write what they enter."""
    number = _NUMBERS.setdefault(item.nodeid, len(_NUMBERS))
    current = _FOLDER / "current"
    current.with_suffix(".new").write_text(str(number))
    current.with_suffix(".new").rename(current)
    sys.modules["sitecustomize"].recorder.begin()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add what a phase of a test took; write the test down with its last phase."""
    name = report.nodeid
    _SECONDS[name] = _SECONDS.get(name, 0.0) + report.duration
    failed = report.failed
    with (_FOLDER / "tests.jsonl").open("a") as file:
        if failed or report.when == "teardown":
            row = {"number": _NUMBERS[name], "test": name, "seconds": _SECONDS[name]}
            file.write(json.dumps(row | {"failed": failed}) + "\n")
