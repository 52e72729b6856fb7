"""What pages take from the sources: public names by task, and Notes with links to them."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from notes import REFERENCE, label_of, notes_of
from sphinx.pycode import ModuleAnalyzer

ROOT = Path(__file__).resolve().parent.parent

_NAMES = re.compile(r"^```\{names\} (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MODULES = re.compile(r"(?:[a-z]\w*[.])+(?=[A-Z])")
_SYMBOL = re.compile(r"^( *:\w[^:]*:\s+)(?=\w{1,4}\.(?: |$))", re.MULTILINE)
_NOTES = re.compile(r"^```\{notes\} (\S+)\n```$", re.MULTILINE)


def _description(module: str, name: str) -> str:
    """Return the directive that describes a public name of a module."""
    value = getattr(importlib.import_module(module), name)
    if inspect.isclass(value):
        kind = "exception" if issubclass(value, BaseException) else "class"
        return f".. auto{kind}:: {module}.{name}"
    if inspect.isroutine(value):
        return f".. autofunction:: {module}.{name}"
    # autodoc does not look for the text of data, nor for what they are, where they were defined.
    lines = [f".. py:data:: {module}.{name}"]
    if not isinstance(value, Collection | Mapping):
        lines.append("   :value: " + _MODULES.sub("", str(value)))
    lines += ["", *(f"   {line}" for line in _text_of_data(module.partition(".")[0], name, value))]
    return "\n".join(lines)


def _text_of_data(package: str, name: str, value: object) -> list[str]:
    """Return what stands below the assignment of `value` in one of the modules of a package."""
    for module in [other for other in sys.modules if f"{other}.".startswith(f"{package}.")]:
        if vars(sys.modules[module]).get(name) is value:
            texts = ModuleAnalyzer.for_module(module).find_attr_docs()
            if ("", name) in texts:
                return list(texts["", name])
    return []


def _as_rst(text: str) -> str:
    return f"```{{eval-rst}}\n{text}\n```"


def describe_names(found: re.Match[str]) -> str:
    """Return what describes the names of a module that a block ``{names} MODULE`` lists."""
    return _as_rst("\n\n".join(_description(found[1], name) for name in found[2].split()))


def write_notes(found: re.Match[str]) -> str:
    """Return all Notes of the package that a block ``{notes} PACKAGE`` names, as sections."""
    return "\n\n".join(
        f"({label_of(note.title)})=\n## {note.title[0].upper()}{note.title[1:]}\n\n"
        f"Of `{note.file}`.\n\n{_as_rst(link_notes(note.text))}"
        for note in notes_of(ROOT / "packages" / found[1])
    )


def link_notes(text: str) -> str:
    """Return reStructuredText in which every reference to a Note is a link."""

    def link(found: re.Match[str]) -> str:
        title = " ".join(found[1].split())
        return f":ref:`Note [{title}] <{label_of(title)}>`"

    return REFERENCE.sub(link, text)


def expand_blocks(_app: Any, _page: str, source: list[str]) -> None:
    """Put what the sources say in the place of the blocks of a page."""
    expansions: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
        (_NAMES, describe_names),
        (_NOTES, write_notes),
    )
    for pattern, expand in expansions:
        source[0] = pattern.sub(expand, source[0])


def link_in_docstring(_app: Any, *rest: Any) -> None:
    """Link the Notes that a docstring refers to; an argument "V." is no list that begins at V."""
    lines = rest[-1]
    lines[:] = link_notes(_SYMBOL.sub(r"\1\\", "\n".join(lines))).splitlines()


def setup(app: Any) -> dict[str, bool]:
    """Register the two above, the links after napoleon has read the docstring."""
    app.connect("source-read", expand_blocks)
    app.connect("autodoc-process-docstring", link_in_docstring, priority=900)
    return {"parallel_read_safe": True}
