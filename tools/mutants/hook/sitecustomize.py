"""Let every process of a test write down which functions of the packages it enters.

Python runs this at its start where the folder is on PYTHONPATH. HP_TEST_MAP names the folder to
write to; without it nothing happens. A function is written once for each test and process, at its
first call, so that processes that are killed are counted as well. Modules are changed as they are
imported, in the process alone: each function begins with a note. torch.compile leaves notes out, so
that tests of compiled code pass; what it has compiled is not written down.
"""

from __future__ import annotations

import ast
import builtins
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_FOLDER = os.environ.get("HP_TEST_MAP", "")
_NOTE = "__hp_note__"


class _Recorder:
    """Writes names of functions, with the test that runs, to one file for all processes."""

    def __init__(self, folder: Path) -> None:
        self._current = folder / "current"
        self._test = ""
        self._file = os.open(folder / "entered", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._entered: set[str] = set()

    def begin(self) -> None:
        """Forget what was entered, and look up which test runs."""
        self._entered.clear()
        self._test = self._current.read_text() if self._current.exists() else ""

    def note(self, function: str) -> None:
        """Write a function down, unless it was since `begin`."""
        if function not in self._entered:
            self._entered.add(function)
            if self._test:
                with suppress(OSError):  # a test may limit the size of files
                    os.write(self._file, f"{self._test} {function}\n".encode())


class _Loader(SourceFileLoader):
    """Puts a note at the head of each function of a module."""

    def source_to_code(self, data: Any, path: Any, **_: Any) -> CodeType:  # type: ignore[override]
        tree = ast.parse(data, path)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not _is_kernel(node):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                key = f"{_from_root(str(path))}:{first}"
                [statement] = ast.parse(f"{_NOTE}({key!r})").body
                for part in ast.walk(statement):
                    ast.copy_location(part, node.body[0])
                    part.__dict__ |= {"end_lineno": None, "end_col_offset": None}
                node.body.insert(1 if ast.get_docstring(node, clean=False) else 0, statement)
        return compile(tree, path, "exec", dont_inherit=True)


def _from_root(path: str) -> str:
    """Return the path of a source file from the root of its repository."""
    return f"packages{path.rpartition('/packages')[2]}"


def _is_kernel(function: ast.FunctionDef) -> bool:
    """Whether Triton compiles the function from its source."""
    return any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)


class _Finder(MetaPathFinder):
    """Finds modules of the packages, whose names begin with `hp_`; sees what torch loads."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torch._dynamo.variables":  # its config was loaded before
            sys.modules["torch._dynamo.config"].ignore_logging_functions.add(_note)
        if not fullname.startswith("hp_"):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def _note(function: str) -> None:
    recorder.note(function)


if _FOLDER:
    builtins.__dict__[_NOTE] = _note  # for modules that runpy executes too
    recorder = _Recorder(Path(_FOLDER))
    recorder.begin()
    os.register_at_fork(after_in_child=recorder.begin)
    sys.meta_path.insert(0, _Finder())
