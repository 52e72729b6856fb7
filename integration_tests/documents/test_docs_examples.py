"""The example of each package's README, and of quickstarts, runs as it stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICKSTARTS = [ROOT / "docs" / "reference" / "hp-context" / "index.md"]
READMES = sorted(ROOT.glob("packages/*/README.md")) + QUICKSTARTS

# All at once, each starts an interpreter as a reader would, and another for the ranks it forks.
IS_WHOLE = os.environ.get("HP_WHOLE") == "1"
pytestmark = [] if IS_WHOLE else [pytest.mark.usefixtures("forked_programs")]


@pytest.mark.parametrize("readme", READMES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_example_of_a_readme_runs_and_prints_something(readme: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "readme_example.py"), str(readme)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
