"""Print the public names of every package from its source, or compare them with packages/*/api.txt.

The public modules are those with an ``automodule`` in docs/reference/PACKAGE/api.md, and their
public names are in ``__all__``. Nothing is imported, so torch is not needed. A change of a name, a
parameter, a default or an annotation shows up as a line of the diff.

    python tools/public_api.py            # exit status 1 and a diff when a snapshot is out of date
    python tools/public_api.py --write    # rewrite the snapshots
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import griffe

ROOT = Path(__file__).resolve().parent.parent
_KINDS = griffe.ParameterKind
_NEW_RESULT = re.compile(r"Callable\[P, (\w+)\]\]$")
"""The end of the annotation of a decorator that keeps the parameters, P, and changes the result."""
Member: TypeAlias = griffe.Object | griffe.Alias


def load_modules() -> dict[Path, griffe.Module]:
    """Load every package, by its directory, with the imports between packages resolved."""
    sources = sorted(ROOT.glob("packages/*/src/*/__init__.py"))
    loader = griffe.GriffeLoader(search_paths=[file.parent.parent for file in sources])
    loaded: dict[Path, griffe.Module] = {}
    for file in sources:
        module = loader.load(file.parent.name)
        if not isinstance(module, griffe.Module):
            message = f"{file.parent} is not a package"
            raise TypeError(message)
        loaded[file.parent.parent.parent] = module
    loader.resolve_aliases(implicit=True, external=False)
    return loaded


def format_parameters(function: griffe.Function, *, skip_first: bool) -> str:
    """Return the parameters as source text, with the ``*`` and ``/`` that separate their kinds."""
    parts: list[str] = []
    previous: griffe.ParameterKind | None = None
    for parameter in list(function.parameters)[1 if skip_first else 0 :]:
        kind = parameter.kind
        if previous is _KINDS.positional_only and kind is not previous:
            parts.append("/")
        if kind is _KINDS.keyword_only and previous not in {kind, _KINDS.var_positional}:
            parts.append("*")
        text = {_KINDS.var_positional: "*", _KINDS.var_keyword: "**"}.get(kind, "") + parameter.name
        if parameter.annotation is not None:
            text += f": {parameter.annotation}"
        if parameter.default is not None and kind not in {
            _KINDS.var_positional,
            _KINDS.var_keyword,
        }:
            text += f" = {parameter.default}"
        parts.append(text)
        previous = kind
    return ", ".join(parts)


def describe(name: str, item: Member, *, depth: int = 0) -> Iterator[str]:
    """Yield the lines of one public object: a function, a class with its members, or a value."""
    indent = "    " * depth
    try:
        target = item.final_target if isinstance(item, griffe.Alias) else item
    except griffe.AliasResolutionError as error:
        yield f"{indent}{name} from {error.alias.target_path}"  # of another distribution
        return
    if isinstance(target, griffe.Module) and name in target.members:
        # A function with the name of the module it is defined in: the import hides the module.
        yield from describe(name, target.members[name], depth=depth)
    elif isinstance(target, griffe.Function):
        kinds = sorted(target.labels & {"async", "classmethod", "staticmethod"})
        prefix = indent + "".join(f"{kind} " for kind in kinds)
        bound = depth > 0 and "staticmethod" not in kinds
        parameters = format_parameters(target, skip_first=bound)
        yield f"{prefix}def {name}({parameters}) -> {returned(target)}"
    elif isinstance(target, griffe.Class):
        yield from (f"{indent}@{decorator.value}" for decorator in target.decorators)
        bases = ", ".join(str(base) for base in target.bases)
        yield f"{indent}class {name}" + (f"({bases})" if bases else "")
        for member_name, member in sorted(public_members(target), key=member_order):
            yield from describe(member_name, member, depth=depth + 1)
    elif isinstance(target, griffe.Attribute):
        label = "property " if "property" in target.labels else ""
        annotation = f": {target.annotation}" if target.annotation is not None else ""
        yield f"{indent}{label}{name}{annotation}{format_value(target)}"
    else:
        yield f"{indent}{target.kind.value} {name}"


def returned(function: griffe.Function) -> str:
    """Return what callers get: a decorator may say that it is something else than `returns`."""
    for decorator in function.decorators:
        path = decorator.callable_path
        if path.partition(".")[0] in function.modules_collection:
            changed = _NEW_RESULT.search(str(function.modules_collection[path].returns))
            if changed:
                return changed[1]
    return str(function.returns)


def public_members(owner: griffe.Class) -> Iterator[tuple[str, Member]]:
    """Yield the members of a class that callers may use; ``__init__`` is how an object is made."""
    for name, member in owner.members.items():
        if name == "__init__" or not name.startswith("_"):
            yield name, member


def member_order(named: tuple[str, Member]) -> tuple[bool, str]:
    """Sort methods by name after the fields, whose order of definition is part of the interface."""
    name, member = named
    is_field = member.is_attribute and "property" not in member.labels
    return (False, "") if is_field else (True, name)


def format_value(attribute: griffe.Attribute) -> str:
    """Return `` = value`` where it is part of the interface: a constant, default or enum member."""
    is_default = "class-attribute" in attribute.labels or "module-attribute" in attribute.labels
    if attribute.value is None or not is_default or attribute.name == "__version__":
        return ""
    return f" = {attribute.value}"


def public_modules(package: griffe.Module) -> Iterator[griffe.Module]:
    """Yield the modules that the package's API page documents.

    Raises:
        ValueError: If the page leaves out the package itself, or names what is no module.
    """
    page = ROOT / "docs" / "reference" / package.path.replace("_", "-") / "api.md"
    documented = re.findall(r"automodule:: (\S+)", page.read_text())
    if package.path not in documented:
        message = f"{page.relative_to(ROOT)} must have an automodule of {package.path}"
        raise ValueError(message)
    for path in documented:
        module = package.modules_collection[path]
        if not isinstance(module, griffe.Module):
            message = f"{page.relative_to(ROOT)}: {path} must be a module"
            raise TypeError(message)
        yield module


def snapshot(package: griffe.Module) -> str:
    """Return the whole text of a package's api.txt."""
    parts = []
    for module in public_modules(package):
        names = sorted(str(getattr(name, "name", name)) for name in module.exports or [])
        described = (line for name in names for line in describe(name, module.members[name]))
        parts.append("\n".join([f"# {module.path}", *described, ""]))
    return "\n".join(parts)


def main() -> int:
    """Compare or write the snapshots; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="rewrite packages/*/api.txt")
    write = parser.parse_args().write
    stale = 0
    for directory, module in load_modules().items():
        path = directory / "api.txt"
        old = path.read_text() if path.exists() else ""
        new = snapshot(module)
        if old == new:
            continue
        stale += 1
        if write:
            path.write_text(new)
            print(f"wrote {path.relative_to(ROOT)}")
            continue
        name = str(path.relative_to(ROOT))
        diff = difflib.unified_diff(old.splitlines(True), new.splitlines(True), name, "the source")
        sys.stdout.writelines(diff)
    if stale and not write:
        print("\nThe public interface changed. If that is meant, run nox -s api -- --write")
        print("and add a line to the CHANGELOG.md of the package.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
