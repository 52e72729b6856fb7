"""Documents to train on: files, folders, jsonl, or the running Python's standard library."""

import json
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hp_train.errors import DataError

# Not the library's own prose and code: third-party packages and megabytes of test tables.
_SKIPPED_PARTS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_TEXT_SUFFIXES = {".py", ".txt", ".md", ".rst", ".jsonl"}


class Document(NamedTuple):
    """One text and the name it is known by, which decides whether it is held out."""

    name: str
    text: str


def standard_library() -> Iterator[Document]:
    """Source and documentation text of the running Python's standard library, in name order."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not _SKIPPED_PARTS.intersection(relative.parts):
            yield Document(relative.as_posix(), path.read_text("utf-8", errors="replace"))


def read_documents(paths: Sequence[str]) -> Iterator[Document]:
    """Documents of the given files and folders, in the order given.

    A folder is read recursively in name order (.py, .txt, .md, .rst, .jsonl). A line of a jsonl
    file is one document: an object with a string under ``text``. Names are relative to the path
    given, so that a corpus keeps its held-out documents when it is moved.

    Raises:
        DataError: Naming file and line of what cannot be read.
    """
    for given in map(Path, paths):
        if given.is_dir():
            files = sorted(p for p in given.rglob("*") if p.is_file())
            files = [p for p in files if p.suffix in _TEXT_SUFFIXES]
        else:
            files = [given]
        for path in files:
            yield from _read_file(path, path.relative_to(given.parent).as_posix())


def _read_file(path: Path, name: str) -> Iterator[Document]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.paths: cannot read {path}: {error}") from None
    if path.suffix != ".jsonl":
        yield Document(name, text)
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield Document(f"{name}:{number}", _json_text(path, number, line))


def _json_text(path: Path, number: int, line: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}:{number}: not a JSON object: {error}") from None
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise DataError(f"{path}:{number}: must be an object with a string under 'text'")
    return text
