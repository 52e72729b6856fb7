"""The example on a model of transformers runs, and shows what it says."""

import runpy
from pathlib import Path

import pytest

from hp_platform.testing import run_distributed

pytest.importorskip("transformers")

EXAMPLE = Path(__file__).parent.parent / "examples" / "transformers_overlap.py"


def run() -> dict[str, float]:
    found: dict[str, float] = runpy.run_path(str(EXAMPLE))["main"]()
    return found


def test_a_model_of_transformers_is_bitwise_the_same_with_overlap() -> None:
    for found in run_distributed(run, world_size=2, timeout=120):
        assert found["tensors"] > 20
        assert found["different"] == 0
        assert found["error"] <= 1e-12
