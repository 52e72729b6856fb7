"""The example trains: the loss on real text falls, and nothing but what may leaves the edge."""

import importlib.util
from pathlib import Path
from types import ModuleType

from hp_platform.testing import run_distributed

EXAMPLE = Path(__file__).parent.parent / "examples" / "u_shape.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("u_shape_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_example() -> list[float]:
    losses: list[float] = load().train([1, 2, 1], None, 25)
    return losses


def test_the_u_shaped_example_learns() -> None:
    losses, *others = run_distributed(run_example, world_size=4, timeout=200)
    assert others == [[], [], []]
    assert losses[0] > 5.0
    assert sum(losses[-5:]) / 5 < 3.2
