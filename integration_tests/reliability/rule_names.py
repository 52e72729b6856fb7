"""Rules of a config as things that can be counted: each is a sentence in the source of a rule.

A rule is the place of a `yield` in :mod:`hp_trainer.config.rules`; its name is that of the function
and the sentence, with `{}` for what the config says.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, GeneratorType
from typing import Any

from hp_trainer.config import Config, rules

_FOLDER = Path(str(rules.__file__)).parent


@cache
def every_rule() -> tuple[str, ...]:
    """Names of all rules, in the order of their files and lines."""
    return tuple(name for path in sorted(_FOLDER.glob("*.py")) for _, name in _sentences(path))


def broken_rules(config: Config) -> list[str]:
    """Names of the rules that a config breaks, in the order in which they are asked.

    Rules that come after the first broken one may raise, as they take for granted that it holds:
    then `"?"` is the last.
    """
    found: list[str] = []
    problems = rules.broken(config)
    assert inspect.isgenerator(problems)
    try:
        found.extend(_name_of(problems) for _ in problems)
    except Exception:
        if not found:
            raise
        found.append("?")
    return found


def _name_of(problems: GeneratorType[Any, Any, Any]) -> str:
    """The name of the rule at whose sentence a generator stands."""
    inner: Any = problems
    while inspect.isgenerator(inner.gi_yieldfrom):
        inner = inner.gi_yieldfrom
    frame: FrameType = inner.gi_frame
    code: CodeType = frame.f_code
    lines = _sentences(Path(code.co_filename))
    return next(name for span, name in lines if frame.f_lineno in span)


@cache
def _sentences(path: Path) -> tuple[tuple[range, str], ...]:
    """The lines of each sentence of a file, and its name."""
    return tuple(_walk(ast.parse(path.read_text()), ""))


def _walk(node: ast.AST, function: str) -> Iterator[tuple[range, str]]:
    for child in ast.iter_child_nodes(node):
        within = child.name if isinstance(child, ast.FunctionDef) else function
        if isinstance(child, ast.Yield) and child.value is not None:
            assert child.end_lineno is not None
            lines = range(child.lineno, child.end_lineno + 1)
            yield lines, f"{within}: {_template(child.value)}"
        else:
            yield from _walk(child, within)


def _template(sentence: ast.expr) -> str:
    """A sentence with `{}` for what is put into it."""
    if isinstance(sentence, ast.JoinedStr):
        text = "".join(
            str(part.value) if isinstance(part, ast.Constant) else f"{{{_short(part)}}}"
            for part in sentence.values
        )
    else:
        text = ast.unparse(sentence).strip("'\"")
    return " ".join(text.split())


def _short(part: ast.expr) -> str:
    """A variable that stands for words is shown, other values are not."""
    assert isinstance(part, ast.FormattedValue)
    text = ast.unparse(part.value)
    return text if re.fullmatch(r"must_be\w*|name|key|axis|extra|with_plan|why", text) else ""
