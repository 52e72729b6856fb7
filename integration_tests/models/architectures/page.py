"""The table of architectures as a page of Markdown. No torch."""

from collections import Counter
from collections.abc import Iterator

from hp_transformers.stages.proven import DIFFERENT, Table
from integration_tests.models.architectures.cells import BOUND, KINDS
from integration_tests.models.architectures.kept import told

_NONE = "-"
_LEGEND = (
    "A number is the largest relative error of logits, losses, norms, all gradients, weights after",
    f"three updates, and weights that were saved, loaded and exported: at most {BOUND:g} unless a",
    f"note says why. A letter is a reason, below, why hp-train refuses the layout. `{_NONE}`: the",
    "layout is not about the architecture, or was not looked at.",
)


def page(table: Table) -> str:
    """Write the page.

    Args:
        table: What was found.
    """
    facts = ", ".join(f"{name} {version}" for name, version in table.versions.items())
    seconds = sum(row.seconds for row in table.rows.values())
    trained = [name for name, row in table.rows.items() if row.cells]
    lines = [
        "# Models of transformers, compared",
        "",
        "<!-- written by `nox -s models -- --page`; not by hand -->",
        "",
        f"{len(table.rows)} causal architectures, {len(trained)} of which train in one process.",
        f"{facts}; {seconds / 60:.0f} CPU minutes on Gloo.",
        "[How it is made](../../how-to/verify-a-layout.md#models-of-transformers).",
        "",
        *_LEGEND,
        "",
        *_counts(table),
        "## Cells",
        "",
        f"| architecture | {' | '.join(KINDS)} |",
        f"|---|{'---|' * len(KINDS)}",
        *(_row(table, name) for name in trained),
        "",
        *_reasons(table),
        *_notes(table),
    ]
    return "\n".join(lines).rstrip() + "\n"


def counts(table: Table) -> dict[str, Counter[str]]:
    """Of each kind, how many cells are equal, refused, different or empty."""
    found: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for name, row in table.rows.items():
        for kind, cell in table.cells(name).items() if row.cells else ():
            found[kind][_state(cell)] += 1
    return found


def _state(cell: float | str | None) -> str:
    if cell is None:
        return _NONE
    if isinstance(cell, str):
        return "different" if cell.startswith(DIFFERENT) else "refused"
    return "equal"


def _counts(table: Table) -> Iterator[str]:
    yield "| layout | equal | refused | different |"
    yield "|---|---|---|---|"
    for kind, count in counts(table).items():
        yield f"| {kind} | {count['equal']} | {count['refused']} | {count['different']} |"
    yield ""


def _row(table: Table, name: str) -> str:
    cells = table.cells(name)
    return f"| {name} | {' | '.join(_cell(table, cells.get(kind)) for kind in KINDS)} |"


def _cell(table: Table, cell: float | str | None) -> str:
    if cell is None:
        return _NONE
    if isinstance(cell, str):
        mark = _mark(table.reasons.index(cell))
        return f"**{mark}**" if cell.startswith(DIFFERENT) else mark
    return told(cell) if cell else "0"


def _mark(index: int) -> str:
    """a, b, ..., z, aa, ab, ..."""
    return (_mark(index // 26 - 1) if index >= 26 else "") + chr(ord("a") + index % 26)


def _reasons(table: Table) -> Iterator[str]:
    if table.reasons:
        yield "## Reasons"
        yield ""
        for index, reason in enumerate(table.reasons):
            yield f"- **{_mark(index)}** {_plain(reason)}"
        yield ""


def _notes(table: Table) -> Iterator[str]:
    unmade = {name: row.note for name, row in table.rows.items() if not row.cells}
    if unmade:
        yield "## Architectures that do not train in one process of transformers"
        yield ""
        yield from (f"- {name}: {_plain(why)}" for name, why in unmade.items())
        yield ""
    bounds = {name: row.bound for name, row in table.rows.items() if row.bound}
    notes: dict[str, list[str]] = {}
    for name, row in table.rows.items():
        if row.cells and row.note:
            notes.setdefault(row.note, []).append(name)
    if bounds or notes:
        yield "## Notes"
        yield ""
        yield from (f"- {name}: {_plain(why)}" for name, why in bounds.items())
        yield from (f"- {_plain(note)}: {', '.join(names)}" for note, names in notes.items())


def _plain(text: str) -> str:
    """Text that Markdown does not read anything into."""
    return "`" + text.replace("`", "'") + "`" if set(text) & set("*_<>[]|") else text
