"""Run the first ``python`` block of a README as a reader would: from a file, in a new directory.

Usage: ``python tools/readme_example.py packages/hp-schedule/README.md``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TIMEOUT_SECONDS = 120
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def first_python_block(markdown: str) -> str:
    """Return the source of the first fenced ``python`` block.

    Raises:
        ValueError: If there is none.
    """
    found = _BLOCK.search(markdown)
    if found is None:
        message = "the README has no ```python block"
        raise ValueError(message)
    return found[1]


def run_example(readme: Path, python: str = sys.executable) -> str:
    """Run a README's example with the interpreter `python` and return what it printed.

    Raises:
        RuntimeError: If it fails or takes longer than `TIMEOUT_SECONDS`; with its output.
    """
    # The example must find the installed packages, not the sources beside it.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "example.py"
        script.write_text(first_python_block(readme.read_text()))
        done = subprocess.run(
            [python, str(script)],
            cwd=directory,
            env=env,
            timeout=TIMEOUT_SECONDS,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode != 0:
        message = f"the example of {readme} ended with status {done.returncode}:\n{done.stdout}"
        raise RuntimeError(message)
    return done.stdout


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(run_example(Path(argument)), end="")
