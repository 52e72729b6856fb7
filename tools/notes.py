"""Find the Notes of the sources: what several places rely on, written once and cited by its title.

A Note is defined where a paragraph of a docstring or of a comment begins with its title::

    Note [Title]. Text to the end of the paragraph, and of a list that follows it.

    Note [Title]
        Indented text; or text to the end of the docstring.

Everywhere else ``Note [Title]`` is a reference.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

REFERENCE = re.compile(r"\bNote\s+\[([^\]]+)\]")
_DEFINITION = re.compile(r"^Note \[([^\]\n]+)\](?:[.:] *|$\n)", re.MULTILINE)
_COMMENT = re.compile(r"^(?:[ \t]*#.*\n)+", re.MULTILINE)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Note:
    """A Note of one package.

    Attributes:
        title: What references call it, the same in no other Note.
        text: Its reStructuredText.
        file: The module, from `src/`.
    """

    title: str
    text: str
    file: str


def label_of(title: str) -> str:
    """Return the name of the place of a Note in the pages."""
    return "note-" + re.sub(r"\W+", "-", title.lower()).strip("-")


def notes_of(package: Path) -> list[Note]:
    """Return the Notes of a package, in the order of its files; `package` holds `src`."""
    root = package / "src"
    return [
        Note(title, text, str(file.relative_to(root)))
        for file in sorted(root.rglob("*.py"))
        if "Note [" in (source := file.read_text())  # parsing is what takes long
        for prose in _prose(source)
        for title, text in _defined(prose)
    ]


def references(source: str) -> Iterator[str]:
    """Yield the titles that a source names, definitions included, on one line each."""
    joined = re.sub(r"\n[ \t]*(?:# )?", " ", source)
    yield from (found[1] for found in REFERENCE.finditer(joined))


def _prose(source: str) -> Iterator[str]:
    """Yield the docstrings and the comments of a source, without indentation."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED):
            yield ast.get_docstring(node) or ""
    for comment in _COMMENT.findall(source):
        yield re.sub(r"^[ \t]*# ?", "", comment, flags=re.MULTILINE)


def _defined(prose: str) -> Iterator[tuple[str, str]]:
    """Yield title and text of each Note that a docstring or a comment defines."""
    found = _DEFINITION.finditer(prose)
    starts = [
        start for start in found if prose[: start.start()].endswith("\n\n") or not start.start()
    ]
    for index, start in enumerate(starts):
        end = starts[index + 1].start() if index + 1 < len(starts) else len(prose)
        body = prose[start.end() : end].rstrip()
        if start[0].endswith("\n"):
            indented = re.match(r"(?:(?:[ \t]+.*)?(?:\n|$))+", body) if body[:1] == " " else None
            yield start[1], dedent(indented[0] if indented else body).strip()
            continue
        paragraphs = body.split("\n\n")
        items = (n for n, text in enumerate(paragraphs) if n and not text.startswith(("- ", "  ")))
        yield start[1], "\n\n".join(paragraphs[: next(items, None)])
