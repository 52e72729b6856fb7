"""Which line of a program asked for something: `file:line` outside torch, and its callers'."""

from __future__ import annotations

import sys
import threading
from functools import cache
from pathlib import Path
from types import CodeType

import torch

_NUM_LINES = 3
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_PLUMBING = (
    _TORCH,
    _HERE,
    threading.__file__,
    "<",
    str(Path(threading.__file__).parent) + "/context",
)

_is_plumbing: dict[CodeType, bool] = {}
_joined: dict[tuple[CodeType | int, ...], str] = {}


def here() -> str:
    """The innermost line of this thread outside torch, and of its callers, joined by `" < "`."""
    frame = sys._getframe(1)  # noqa: SLF001 # of this thread
    found: list[CodeType | int] = []
    while frame is not None:
        code = frame.f_code
        skip = _is_plumbing.get(code)
        if skip is None:
            skip = _is_plumbing[code] = code.co_filename.startswith(_PLUMBING)
        if not skip:
            found += (code, frame.f_lasti)
            if len(found) == 2 * _NUM_LINES:
                break
        frame = frame.f_back  # type: ignore[assignment]
    key = tuple(found)
    line = _joined.get(key)
    if line is None:
        line = _joined[key] = " < ".join(map(_line, found[::2], found[1::2])) or "torch"
    return line


def _line(code: CodeType | int, instruction: CodeType | int) -> str:
    assert isinstance(code, CodeType)
    last = code.co_firstlineno
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:  # type: ignore[operator]
            last = line
    return f"{_short(code.co_filename)}:{last}"


@cache
def _short(file: str) -> str:
    for root in ("/site-packages/", "/src/"):
        if root in file:
            return file.rsplit(root, 1)[1]
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file
