"""The example of an attention module of somebody's own runs, and shows what it says."""

import runpy
from pathlib import Path

from hp_platform.testing import run_distributed

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str) -> dict[str, float]:
    found: dict[str, float] = runpy.run_path(str(EXAMPLES / name))["main"]()
    return found


def test_a_module_never_seen_equals_one_process_in_every_mode() -> None:
    for found in run_distributed(run, "own_attention.py", world_size=4):
        assert found.keys() == {"Ulysses", "all-gather K/V", "hybrid"}
        assert max(found.values()) <= 1e-12
