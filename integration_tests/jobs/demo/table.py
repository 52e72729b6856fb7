"""What was found of architectures as a page of Markdown. No torch."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from integration_tests.jobs.demo.causes import CAUSES, VERSION
from integration_tests.jobs.demo.cells import (
    DIFFERENT,
    EQUAL,
    FAILED,
    LAYOUTS,
    RED,
    Architecture,
    Cell,
)
from integration_tests.models.architectures.kept import told

_MARKS = {DIFFERENT: "**different**", FAILED: "**failed**"}


def table(found: Sequence[Architecture]) -> str:
    """Write the page.

    Args:
        found: Architectures, in the order of their names.
    """
    versions = next((one.versions for one in found), {})
    facts = ", ".join(f"{name} {version}" for name, version in versions.items())
    seconds = sum(one.seconds for one in found)
    where = f"two ranks of Gloo on a CPU, {seconds / 60:.0f} minutes"
    lines = [
        "# Transformers' layouts beside one process",
        "",
        "<!-- written by `nox -s demo -- --table`; not by hand -->",
        "",
        f"{facts}; {where}. [How](../../how-to/verify-any-job.md#a-demonstration).",
        "",
        *_counts(found),
        *_causes(found, versions.get("transformers", "")),
        "## Cells",
        "",
        "A number is the largest relative error of a gradient or a weight over two steps.",
        "",
        f"| architecture | {' | '.join(LAYOUTS)} |",
        f"|---|{'---|' * len(LAYOUTS)}",
        *(_row(one) for one in found if one.cells),
        "",
        *_without(found),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _counts(found: Sequence[Architecture]) -> Iterator[str]:
    counts = {
        layout: Counter(c.state for one in found for c in one.cells if c.layout == layout)
        for layout in LAYOUTS
    }
    states = sorted({state for count in counts.values() for state in count})
    yield f"| layout | {' | '.join(states)} |"
    yield f"|---|{'---|' * len(states)}"
    for layout, count in counts.items():
        yield f"| {layout} | {' | '.join(str(count[state]) for state in states)} |"
    yield ""


def _causes(found: Sequence[Architecture], version: str) -> Iterator[str]:
    red = {(one.name, cell.layout) for one in found for cell in one.cells if cell.state in RED}
    if not red:
        return
    yield "## Why cells are red"
    yield ""
    if version == VERSION:
        yield "Each was seen in transformers and torch alone, by the program that the demo prints."
        yield ""
        for cause in CAUSES:
            cells = [
                f"{name} ({', '.join(layout for layout in layouts if (name, layout) in red)})"
                for name, layouts in cause.cells.items()
                if any((name, layout) in red for layout in layouts)
            ]
            red -= {(name, layout) for name, some in cause.cells.items() for layout in some}
            if cells:
                yield f"- **{cause.what}:** {', '.join(cells)}. {cause.why}"
    if red:
        rest = ", ".join(f"{name} ({layout})" for name, layout in sorted(red))
        yield f"- **Not looked into:** {rest}."
    yield ""


def _row(one: Architecture) -> str:
    by_layout = {cell.layout: cell for cell in one.cells}
    return f"| {one.name} | {' | '.join(_cell(by_layout[name]) for name in LAYOUTS)} |"


def _cell(cell: Cell) -> str:
    return told(cell.error) if cell.state == EQUAL else _MARKS.get(cell.state, cell.state)


def _without(found: Iterable[Architecture]) -> Iterator[str]:
    unmade = [one for one in found if not one.cells]
    if unmade:
        yield "## Architectures whose tiny model does not train in one process"
        yield ""
        for one in unmade:
            yield f"- {one.name}: `{one.reason.replace('`', '')[:160]}`"
