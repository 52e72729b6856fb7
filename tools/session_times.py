"""Wall-clock and CPU seconds of the sessions of one run of nox, as a table and as JSON."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def recorded(name: str, folder: Path) -> Iterator[None]:
    """Write what a session takes, with all it waits for, to a JSON file of its own in `folder`."""
    began, used = time.monotonic(), _children_seconds()
    try:
        yield
    finally:
        seconds = time.monotonic() - began
        row = {"name": name, "seconds": seconds, "cpu_seconds": _children_seconds() - used}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(row))


def summarize(folder: Path, *, since: float) -> str:
    """Put the records of a run together, in a file that has the folder's name and `.json`.

    Args:
        folder: Folder of the records, as for `recorded`.
        since: When the run began, in seconds since the epoch; older records are passed over.

    Returns:
        A table; empty if no session was recorded.
    """
    files = [file for file in folder.glob("*.json") if file.stat().st_mtime >= since]
    rows = [json.loads(file.read_text()) for file in files]
    if not rows:
        return ""
    rows.sort(key=lambda row: -row["cpu_seconds"])
    cpu_seconds = sum(row["cpu_seconds"] for row in rows)
    together = {"name": "together", "seconds": time.time() - since, "cpu_seconds": cpu_seconds}
    found = {"sessions": rows, "together": together}
    folder.with_suffix(".json").write_text(json.dumps(found, indent=1))
    width = max(len(row["name"]) for row in [*rows, together])
    lines = [f"{'session':{width}}   seconds  CPU seconds"]
    lines += [
        f"{row['name']:{width}}  {row['seconds']:8.1f}  {row['cpu_seconds']:11.1f}"
        for row in [*rows, together]
    ]
    return "\n".join(lines)


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
