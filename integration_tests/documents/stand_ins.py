"""Python where packages that a page has changed stand in for the installed ones."""

import os
import subprocess
import sys
from pathlib import Path


def python(folder: Path, *arguments: str) -> str:
    """Run Python where the packages of `folder` come before the installed ones."""
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
