"""Find the private symbols of torch that the packages use and compare them with the list of them.

The list is docs/private_torch_symbols.toml: each symbol with the reason why it is needed. The scan
is static and sees

* names with an underscore reached through an import of torch: ``torch._C.Name``, and
  ``from torch.distributed.distributed_c10d import _name``;
* attributes with an underscore on any other object, where no source of the repository defines that
  name: ``tensor._version`` is listed as ``?._version``, or under the class that owns it.

    python tools/private_torch_symbols.py               # status 1 on symbols unlisted or unused
    python tools/private_torch_symbols.py --installed   # and on those the installed torch lacks
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "docs" / "private_torch_symbols.toml"
NAMED_TUPLE_API = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}


def is_private(name: str) -> bool:
    """Tell whether a name begins with one underscore (``__dunder__`` names are public protocol)."""
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


class _Scan(ast.NodeVisitor):
    """Collects the private torch symbols of one module, and the private names that it defines."""

    def __init__(self) -> None:
        self.aliases: dict[str, str] = {}  # local name -> dotted path within torch
        self.others: set[str] = set()  # modules that are not torch's: os._exit is theirs
        self.symbols: set[str] = set()
        self.foreign: set[str] = set()  # underscore attributes of objects of unknown type
        self.defined: set[str] = set()

    def visit_Import(self, node: ast.Import) -> None:
        for name in node.names:
            if name.name.split(".")[0] == "torch":
                self._note(name.name)
                bound = name.asname or "torch"
                self.aliases[bound] = name.name if name.asname else "torch"
            else:
                self.others.add(name.asname or name.name.split(".")[0])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        for name in node.names:
            if module.split(".")[0] == "torch":
                self.aliases[name.asname or name.name] = f"{module}.{name.name}"
                self._note(f"{module}.{name.name}")
            elif is_private(name.name):
                self.defined.add(name.name)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self._resolve(node)
        if path is not None:
            self._note(path)
            return
        owner = node.value.id if isinstance(node.value, ast.Name) else None
        if owner in {"self", "cls"}:
            if isinstance(node.ctx, ast.Store):
                self.defined.add(node.attr)
        elif (
            is_private(node.attr) and owner not in self.others and node.attr not in NAMED_TUPLE_API
        ):
            self.foreign.add(node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        # getattr(torch._C, "_name", None) is how a symbol that some versions lack is reached, and
        # patch.object(torch._C, "_name", other) how one is another in a context.
        match node:
            case ast.Call(
                ast.Name("getattr" | "hasattr") | ast.Attribute(attr="object"),
                [owner, ast.Constant(str(name)), *_],
            ):
                path = self._resolve(owner)
                if path is not None:
                    self._note(f"{path}.{name}")
                elif is_private(name) and name not in NAMED_TUPLE_API:
                    self.foreign.add(name)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.defined.add(node.name)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.defined.add(node.name)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.defined.add(node.target.id)
        self.generic_visit(node)

    def _resolve(self, node: ast.expr) -> str | None:
        """Return the dotted path of a chain of attributes that starts at an import of torch."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._resolve(node.value)
            return f"{owner}.{node.attr}" if owner else None
        return None

    def _note(self, path: str) -> None:
        """Keep a path that has a private part, up to the name that follows its last one."""
        parts = path.split(".")
        private = [i for i, part in enumerate(parts) if is_private(part)]
        if private:
            self.symbols.add(".".join(parts[: private[-1] + 2]))


def scan(files: Iterable[Path]) -> tuple[dict[str, set[str]], set[str]]:
    """Return the private symbols in use, each with the files that use it, and doubtful names.

    A doubtful name is used on an object of unknown type and defined in the sources as well: it may
    be torch's (where a source overrides a private method of torch) or not.
    """
    used: dict[str, set[str]] = defaultdict(set)
    foreign: dict[str, set[str]] = defaultdict(set)
    defined: set[str] = set()
    for file in files:
        visitor = _Scan()
        visitor.visit(ast.parse(file.read_text(), str(file)))
        where = str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else str(file)
        for symbol in visitor.symbols:
            used[symbol].add(where)
        for name in visitor.foreign:
            foreign[name].add(where)
        defined |= visitor.defined
    for name in foreign.keys() - defined:
        used[f"?.{name}"] |= foreign[name]
    # The import of a private module says less than the names that are used of it.
    symbols = {
        symbol: where
        for symbol, where in used.items()
        if not any(other.startswith(f"{symbol}.") for other in used)
    }
    return symbols, foreign.keys() & defined


def exists(symbol: str) -> bool:
    """Tell whether a dotted path can be reached in what is installed."""
    parts = symbol.split(".")
    for split in range(len(parts), 0, -1):
        try:
            target: object = importlib.import_module(".".join(parts[:split]))
        except ImportError:
            continue
        for name in parts[split:]:
            if not hasattr(target, name):
                return False
            target = getattr(target, name)
        return True
    return False


def compare(
    used: Mapping[str, set[str]], listed: Iterable[str], doubtful: AbstractSet[str] = frozenset()
) -> Iterator[str]:
    """Yield one line for each symbol that is used but not listed, or listed but not used."""
    listed = set(listed)
    # The class that owns ?._name is for the list to say.
    listed_names = {symbol.rsplit(".", 1)[-1] for symbol in listed}
    for symbol, files in sorted(used.items()):
        if symbol not in listed and not (symbol.startswith("?.") and symbol[2:] in listed_names):
            yield f"not listed: {symbol} in {', '.join(sorted(files))}"
    used_names = doubtful | {symbol[2:] for symbol in used if symbol.startswith("?.")}
    for symbol in sorted(listed - used.keys()):
        if symbol.rsplit(".", 1)[-1] not in used_names:
            yield f"listed but not used: {symbol}"


def main() -> int:
    """Print what differs; return the exit status."""
    parser = argparse.ArgumentParser(description="Check the private torch symbols in use.")
    parser.add_argument("--installed", action="store_true", help="look them up in torch as well")
    installed = parser.parse_args().installed
    table = tomllib.loads(LIST.read_text())["symbols"]
    used, doubtful = scan(sorted(ROOT.glob("packages/*/src/**/*.py")))
    problems = list(compare(used, table, doubtful))
    if installed:
        # A symbol with a fallback may be missing from some versions.
        needed = (name for name, entry in sorted(table.items()) if not entry.get("fallback"))
        problems += [f"not in the installed torch: {name}" for name in needed if not exists(name)]
    for problem in problems:
        print(problem)
    print(f"{len(table)} private torch symbols listed, {len(problems)} problems ({LIST.name})")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
