"""The example of each package's README, and of quickstarts, runs as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
QUICKSTARTS = [ROOT / "docs" / "hp-context" / "index.md"]
READMES = sorted(ROOT.glob("packages/*/README.md")) + QUICKSTARTS


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
