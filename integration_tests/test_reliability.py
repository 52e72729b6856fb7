"""A small part of `nox -s reliability`, in every run of the tests."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_what_goes_wrong_is_found_and_got_over(tmp_path: Path) -> None:
    counts = {"kills": 3, "flips": 40, "others": 7, "configs": 55, "reloads": 3}
    counts |= {"models": 40}
    options = [f"--{name}={count}" for name, count in counts.items()]
    done = subprocess.run(
        [sys.executable, "-m", "integration_tests.reliability", *options, f"--folder={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = ("kills: 3 of 3", "damages: 47 of 47", "configs: 55 of 55", "reloads: 3 of 3")
    for line in (*lines, "models: 40 of 40"):
        assert f"{line} good" in done.stdout
