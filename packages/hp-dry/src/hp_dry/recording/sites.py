"""Lines of a program outside torch that cause an event: `file:line`, with the callers."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import sys
import threading
from functools import cache, lru_cache
from itertools import starmap
from pathlib import Path
from types import CodeType, FrameType

import torch
import typing_extensions

import hp_platform

_NUM_LINES = 3
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parents[1])
_PLUMBING = (
    _TORCH,
    _HERE,
    str(Path(hp_platform.__file__).parent / "_internals"),
    threading.__file__,
    contextlib.__file__,
    functools.__file__,
    typing_extensions.__file__,  # wrapper of deprecated functions of torch
    str(Path(multiprocessing.__file__).parent),
    "<",
)
_INSIDE, _OUTSIDE, _ENGINE = range(3)


def here() -> tuple[str, bool]:
    """Find the innermost line of this thread outside torch and its callers, joined by `" < "`.

    Returns:
        The lines, and whether the autograd engine is between the first line and this call, so that
        the operator computes a gradient.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 # of this thread
    found: list[tuple[CodeType, int]] = []
    by_engine = False
    while frame is not None:
        code = frame.f_code
        kind = _kind_of(code)
        if kind == _OUTSIDE:
            found.append((code, frame.f_lasti))
            if len(found) == _NUM_LINES:
                break
        elif kind == _ENGINE and not found:
            by_engine = True
        frame = frame.f_back
    return _joined(tuple(found)), by_engine


@lru_cache(maxsize=65_536)
def backward_place(place: str, origin: str) -> str:
    """Return the place of an operator of backward: that of the thread, and the forward module.

    >>> backward_place("step 1, 0B0", "step 1, 0F0, experts")
    'step 1, 0B0, experts, backward'
    """
    words = place.split(", ") if place else []
    return ", ".join((*words, *origin.split(", ")[len(words) :], "backward")) if origin else place


@cache
def _kind_of(code: CodeType) -> int:
    if code.co_name == "_engine_run_backward":
        return _ENGINE
    return _INSIDE if code.co_filename.startswith(_PLUMBING) else _OUTSIDE


@cache
def _joined(lines: tuple[tuple[CodeType, int], ...]) -> str:
    return " < ".join(starmap(_line, lines)) or "torch"


def _line(code: CodeType, instruction: int) -> str:
    at = code.co_firstlineno
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            at = line
    return f"{_short(code.co_filename)}:{at}"


@cache
def _short(file: str) -> str:
    for root in ("/site-packages/", "/src/"):
        if root in file:
            return file.rsplit(root, 1)[1]
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file
