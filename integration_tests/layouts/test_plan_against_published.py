"""`hp plan` against steps that others have published; `bench_plan_published.py` prints all."""

import importlib.util
import statistics
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hp_base.data_sheets import REACHED

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_plan_published.py"


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_plan_published", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.sample("kept aside")
@pytest.mark.parametrize("is_aside", [False, True], ids=["fitted", "kept aside"])
def test_published_steps_are_priced_within_a_quarter(*, is_aside: bool) -> None:
    rows = [row for row in loaded().read_rows() if row.is_aside is is_aside]
    misses = [abs(row.predicted(REACHED) / row.tokens - 1) for row in rows]
    assert len(misses) >= 4
    assert statistics.median(misses) <= 0.15
    assert max(misses) <= 0.25
