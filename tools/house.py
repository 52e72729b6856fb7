"""Measure how large the packages are, how they read, and how far one act goes through them.

    python tools/house.py                          # this checkout
    python tools/house.py /tmp/old --json          # another one, as JSON
    python tools/house.py --against /tmp/old       # before (there) and after (here)
    python tools/house.py --static                 # without running anything, so without torch

A row is a figure of one package:

* statements: of the syntax tree, without docstrings;
* texts: of arguments and attributes in docstrings, and of these the fragments, see `is_fragment`;
* Any, cast, ignore: uses of `Any` in code, calls of `cast`, and comments `type: ignore`;
* files, small: modules, and those of at most 60 lines;
* docstrings, relative: of modules, classes and functions, and how many of these
  begin with a relative word (`RELATIVE`) and not with a verb or a noun;
* rooms: modules and sub-packages right below the package; arrows: pairs of rooms of which one
  imports the other when it is loaded (not in a function, not for type checkers alone); circles:
  sets of rooms that import each other; loops: sets of modules that do, annotations included.

A walk is what `house_walks.py` counts: files / functions / calls of the packages in one act; the
walk of the config, which nothing is run for, is that of `config_walk.py`.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TypeAlias

from config_walk import config_walk

ROOT = Path(__file__).resolve().parent.parent
Figures: TypeAlias = dict[str, dict[str, int | str]]  # row -> column -> figure
# Chosen to come near an earlier count at 41bc79d, 437 of 2,228: these give 435 of 2,243, and 476
# with "for" among them. Compare commits by it; it is no measure of its own.
_OPENERS = re.compile("among|at|between|from|in|of|on|over|that|to|under|whose|without")
_CLOSERS = re.compile(
    "about|after|against|as|at|before|behind|between|by|for|from|in|into|of|on|onto|over|through|"
    "to|under|upon|with|without"
)
_SECTION = re.compile(r"^(?:Args|Attributes|Arguments):\n((?:[ \t]+.*\n?|\n)*)", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}\*{0,2}\w[\w., *]*(?:\([^)]*\))?:\s+(.*(?:\n {5,}.*)*)", re.MULTILINE)
RELATIVE = frozenset(["What", "Whether", "Which", "How", "Where", "When", "Who", "Whose", "That"])
"""Words that begin a docstring which tells a thing by a clause: 18.1 % of 831f8c0d's."""
_SMALL_LINES = 60
_OWNERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def is_fragment(text: str) -> bool:
    """Tell whether the first phrase of a text names nothing: "Of the run.", "To read from.".

    It begins with a preposition, `that` or `whose`, or ends in a preposition. "What ..." and "Where
    ..." are left out: a clause can be the name of a thing.

    >>> [is_fragment(text) for text in ("Whose ranks are which.", "The rank to send to; 0: none.")]
    [True, True]
    >>> is_fragment("Seconds to wait for a rank.")
    False
    """
    phrase = re.split(r"[.;:,](?:\s|$)", " ".join(text.split()), maxsplit=1)[0]
    words = re.findall(r"[\w'-]+", phrase.lower())
    if not words:
        return False
    return bool(_OPENERS.fullmatch(words[0]) or _CLOSERS.fullmatch(words[-1]))


def is_relative(docstring: str) -> bool:
    """Tell whether a docstring begins with a relative word.

    >>> [is_relative(text) for text in ("Whether it is.", "Return whether it is.", "")]
    [True, False, False]
    """
    word = re.match(r"\W*(\w+)", docstring)
    return word is not None and word[1] in RELATIVE


def texts_of(docstring: str) -> Iterator[str]:
    """Yield the texts of arguments and attributes in a docstring in Google's style."""
    for section in _SECTION.finditer(docstring):
        yield from (entry[1] for entry in _ENTRY.finditer(section[1]))


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, _OWNERS) and (text := ast.get_docstring(node)):
            yield text


def count_source(source: str) -> Counter[str]:
    """Count what the source of one module has of each figure but rooms."""
    tree = ast.parse(source)
    counts: Counter[str] = Counter()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(ast.Constant(str())):
                continue  # a docstring, of a constant too
            case ast.Call(ast.Name("cast") | ast.Attribute(attr="cast")):
                counts["cast"] += 1
            case ast.Name("Any"):
                counts["Any"] += 1
        counts["statements"] += isinstance(node, ast.stmt)
    counts["files"], counts["small"] = 1, len(source.splitlines()) <= _SMALL_LINES
    for docstring in _docstrings(tree):
        counts["docstrings"] += 1
        counts["relative"] += is_relative(docstring)
        for text in texts_of(docstring):
            counts["texts"] += 1
            counts["fragments"] += is_fragment(text)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and "type: ignore" in token.string:
            counts["ignore"] += 1
    return counts


def _loaded(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that run when a module is loaded."""
    for node in body:
        match node:
            case ast.Import() | ast.ImportFrom():
                yield node
            case ast.If(ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                yield from _loaded(node.orelse)
            case ast.If() | ast.Try() | ast.With() | ast.ClassDef():
                for part in ("body", "orelse", "finalbody"):
                    yield from _loaded(getattr(node, part, []))


def arrows_of(package: Path) -> tuple[set[str], set[tuple[str, str]]]:
    """Return the rooms of a package, and the pairs of which the first imports the second.

    Args:
        package: Folder of an importable package, below src.
    """
    rooms = {p.stem for p in package.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    rooms -= {"__init__", "__main__"}
    arrows = set()
    for file in sorted(package.rglob("*.py")):
        room = file.relative_to(package).parts[0].removesuffix(".py")
        for node in _loaded(ast.parse(file.read_text()).body):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            else:
                targets = [f"{node.module}.{alias.name}" for alias in node.names]
            for target in targets:
                top, _, rest = target.partition(".")
                other = rest.partition(".")[0]
                if top == package.name and other in rooms and room in rooms and other != room:
                    arrows.add((room, other))
    return rooms, arrows


def circles_of(arrows: AbstractSet[tuple[str, str]]) -> list[list[str]]:
    """Return the sets of rooms that can all be reached from each other, each sorted.

    >>> circles_of({("a", "b"), ("b", "a"), ("b", "c")})
    [['a', 'b']]
    """
    rooms = {room for arrow in arrows for room in arrow}
    reached = {room: {other for start, other in arrows if start == room} for room in rooms}
    for middle in rooms:
        for room in rooms:
            if middle in reached[room]:
                reached[room] |= reached[middle]
    found = {
        tuple(sorted(other for other in reached[room] if room in reached[other]))
        for room in rooms
        if room in reached[room]
    }
    return [list(circle) for circle in sorted(found)]


def loops_of(package: Path) -> list[list[str]]:
    """Return the sets of modules of a package that import each other, for types alone as well.

    Args:
        package: Folder of an importable package, below src.
    """
    files = {_module_name(package, file): file for file in package.rglob("*.py")}
    arrows = set()
    for name, file in files.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    other = full if full in files else node.module
                    if other in files and other != name and not file.name.startswith("__init__"):
                        arrows.add((name, other))
    return circles_of(arrows)


def _module_name(package: Path, file: Path) -> str:
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def static_figures(checkout: Path) -> Figures:
    """Return the figures of every package of a checkout, and their sums."""
    figures: Figures = {}
    total: Counter[str] = Counter()
    columns: tuple[str, ...] = ("files", "small", "statements", "docstrings", "relative", "texts")
    columns += ("fragments", "Any", "cast", "ignore")
    for package in sorted(checkout.glob("packages/*/src/*/__init__.py")):
        counts: Counter[str] = Counter()
        for file in package.parent.rglob("*.py"):
            counts += count_source(file.read_text())
        rooms, arrows = arrows_of(package.parent)
        circles = circles_of(arrows)
        counts.update(rooms=len(rooms), arrows=len(arrows), circles=len(circles))
        counts.update(loops=len(loops_of(package.parent)))
        row = {c: counts[c] for c in (*columns, "rooms", "arrows", "circles", "loops")}
        total.update(row)
        figures[package.parent.name] = {**row}
    figures["all"] = {column: total[column] for column in next(iter(figures.values()), {})}
    return figures


def walk_figures(checkout: Path) -> Figures:
    """Run the walks through a checkout in a process of its own."""
    sources = [str(source) for source in sorted(checkout.glob("packages/*/src"))]
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("house_walks.py")), str(checkout)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sources)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    walks: Mapping[str, list[int]] = json.loads(result.stdout.splitlines()[-1])
    names = ("files", "functions", "calls")
    return {name: dict(zip(names, walk, strict=True)) for name, walk in walks.items()}


def table(after: Figures, before: Figures | None = None) -> str:
    """Return figures as text in columns; with `before`, ``before > after`` where they differ."""

    def cell(row: str, column: str) -> str:
        new = after.get(row, {}).get(column, "-")
        old = new if before is None else before.get(row, {}).get(column, "-")
        return str(new) if new == old else f"{old} > {new}"

    rows = [*after, *(row for row in before or {} if row not in after)]
    columns = [*next(iter(after.values()))]
    lines = [["", *columns], *([row, *(cell(row, column) for column in columns)] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    )


def measure(checkout: Path, *, static: bool) -> dict[str, Figures]:
    """Return all figures of a checkout."""
    config: Figures = {"config, from start on": {**config_walk(checkout)}}
    figures = {"packages": static_figures(checkout), "config": config}
    return figures if static else figures | {"walks": walk_figures(checkout)}


def main() -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", nargs="?", type=Path, default=ROOT, help="what to measure")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="what it was before")
    parser.add_argument("--static", action="store_true", help="run no walks")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args()
    after = measure(options.checkout.resolve(), static=options.static)
    before: dict[str, Figures] = {}
    if options.against:
        before = measure(options.against.resolve(), static=options.static)
    if options.json:
        print(json.dumps({"before": before, "after": after} if before else after, indent=2))
        return 0
    for part, figures in after.items():
        print(table(figures, before.get(part)), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
