"""Follow the config of a run through the sources, from `start` on; `house.py` prints the figures.

Nothing is run. A call is followed, in the order of the sources and into all branches, if an
argument of it is the config or made of it: a part of it, a name or an attribute that was assigned
such a value, an object of ours or a result of a function of ours that got one. Callees that a name
says are followed: functions, constructors and methods of `self`, but no other methods, whose class
is known only when the program runs; and none of hp-platform, hp-schedule and hp-optim, which know
no config: an optimizer of ours is as one of torch. A function is walked through once. A room is a
file that is entered, a return the entry of a file that was left before.

At 831f8c0d, where `start` was in hp_train, this rule gives 65 rooms and 82 returns; a walk that
also guesses methods by their names counted 68 and 88.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, TypeAlias

_APART = ("hp_platform", "hp_schedule", "hp_optim")
_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_Place: TypeAlias = tuple[str, str]  # module, and a name in it


class _Definition(NamedTuple):
    """A function: its module, its class if it is a method, and its syntax tree."""

    module: str
    owner: str
    node: _Function


class _Sources:
    """Functions, classes and imports of all packages of a checkout."""

    def __init__(self, checkout: Path) -> None:
        self._functions: dict[_Place, _Definition] = {}  # also ("module", "Class.method")
        self._classes: set[_Place] = set()
        self._imports: dict[_Place, _Place] = {}
        for source in checkout.glob("packages/*/src"):
            for file in source.rglob("*.py"):
                module = ".".join(file.relative_to(source).with_suffix("").parts)
                if not module.startswith(_APART):
                    self._read(module.removesuffix(".__init__"), ast.parse(file.read_text()))

    def _read(self, module: str, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    self._imports[module, alias.asname or alias.name] = (node.module, alias.name)
        for node in tree.body:
            if isinstance(node, _Function):
                self._functions[module, node.name] = _Definition(module, "", node)
            elif isinstance(node, ast.ClassDef):
                self._classes.add((module, node.name))
                for part in node.body:
                    if isinstance(part, _Function):
                        method = _Definition(module, node.name, part)
                        self._functions[module, f"{node.name}.{part.name}"] = method

    def starts(self) -> list[_Definition]:
        """Return the function with which the training of a rank starts."""
        return [
            f
            for (module, name), f in self._functions.items()
            if module.endswith("training.train") and name == "start"
        ]

    def called(self, caller: _Definition, callee: ast.expr) -> tuple[_Definition | None, bool]:
        """Return the function that a call enters, if a name says it, and if it is ours at all."""
        match callee:
            case ast.Name(name):
                place = self._origin(caller.module, name)
                made = self._functions.get((place[0], f"{place[1]}.__init__"))
                return self._functions.get(place, made), place in self._classes
            case ast.Attribute(ast.Name("self"), name):
                return self._functions.get((caller.module, f"{caller.owner}.{name}")), False
            case ast.Attribute(ast.Name(module), name):
                return self._functions.get(
                    (".".join(self._origin(caller.module, module)), name)
                ), False
        return None, False

    def _origin(self, module: str, name: str) -> _Place:
        place = module, name
        while place in self._imports:
            place = self._imports[place]
        return place


class _Walk:
    """A walk, which notes the module of each function that it comes to."""

    def __init__(self, sources: _Sources) -> None:
        self._sources = sources
        self._passed: set[int] = set()
        self._kept: set[_Place] = set()  # class, and an attribute that has the config
        self.stays: list[str] = []

    def enter(self, place: _Definition, names: set[str]) -> None:
        """Walk through a function in which some names are the config or made of it."""
        if self.stays[-1:] != [place.module]:
            self.stays.append(place.module)
        if id(place.node) not in self._passed:
            self._passed.add(id(place.node))
            self._any(place, place.node.body, names)

    def _any(self, place: _Definition, nodes: Iterable[ast.AST], names: set[str]) -> bool:
        found = [self._has(place, node, names) for node in nodes]  # all of them are walked through
        return any(found)

    def _has(self, place: _Definition, node: ast.AST, names: set[str]) -> bool:
        """Walk through a part of a function; return whether it is the config or made of it."""
        match node:
            case ast.Name("self"):
                return any(owner == place.owner for owner, _ in self._kept)
            case ast.Name(name):
                return name in names
            case ast.Attribute(ast.Name("self"), name):
                return (place.owner, name) in self._kept
            case ast.Call():
                return self._call(place, node, names)
            case ast.Assign(targets, value):
                self._assign(place, targets, value, names)
            case ast.AnnAssign(target, _, value) | ast.NamedExpr(target, value) if value:
                self._assign(place, [target], value, names)
            case ast.For(target, values) | ast.comprehension(target, values):
                self._assign(place, [target], values, names)
                rest = [*node.body, *node.orelse] if isinstance(node, ast.For) else node.ifs
                self._any(place, rest, names)
            case _:
                parts = [*ast.iter_child_nodes(node)]  # a comprehension's loops before its element
                return self._any(place, sorted(parts, key=_is_no_loop), names)
        return False

    def _assign(
        self, place: _Definition, targets: list[ast.expr], value: ast.expr, names: set[str]
    ) -> None:
        if not self._has(place, value, names):
            return
        for node in (part for target in targets for part in ast.walk(target)):
            match node:
                case ast.Attribute(ast.Name("self"), name):
                    self._kept.add((place.owner, name))
                case ast.Name(name) if name != "self":
                    names.add(name)

    def _call(self, place: _Definition, call: ast.Call, names: set[str]) -> bool:
        on_self = isinstance(call.func, ast.Attribute) and self._has(place, call.func.value, names)
        values = [self._has(place, value, names) for value in call.args]
        given = {k.arg or "" for k in call.keywords if self._has(place, k.value, names)}
        if not (on_self or any(values) or given):
            return False
        function, is_class = self._sources.called(place, call.func)
        if function is not None:
            bound = [a.arg for a in function.node.args.args if a.arg not in ("self", "cls")]
            given |= {name for name, value in zip(bound, values, strict=False) if value}
            self.enter(function, given)
        return function is not None or is_class


def _is_no_loop(node: ast.AST) -> bool:
    return not isinstance(node, ast.comprehension)


def config_walk(checkout: Path) -> dict[str, int]:
    """Count the rooms and returns of the config of a run, from `start` on."""
    sources = _Sources(checkout)
    walk = _Walk(sources)
    for start in sources.starts():
        walk.enter(start, {"config"})
    rooms = len({*walk.stays})
    return {"rooms": rooms, "returns": len(walk.stays) - rooms}
