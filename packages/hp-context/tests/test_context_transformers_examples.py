"""The example of a model of transformers runs, and shows what it says."""

import runpy
from pathlib import Path

import pytest

from hp_platform.testing import run_distributed

pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str) -> dict[str, float]:
    found: dict[str, float] = runpy.run_path(str(EXAMPLES / name))["main"]()
    return found


def test_a_llama_on_two_ranks_takes_the_steps_of_one_process() -> None:
    for found in run_distributed(run, "transformers_cp.py", world_size=2, timeout=180):
        before, after, of_loss, of_weights = found.values()
        assert after != before
        assert of_loss <= 1e-12
        assert of_weights <= 1e-12
