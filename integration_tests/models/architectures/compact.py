"""What was found, in the form that comes with the package. No torch."""

import re
from collections.abc import Iterable

import msgspec

from hp_transformers.stages.proven import DIFFERENT, Row, Table
from integration_tests.models.architectures.cells import (
    BOUND,
    EQUAL,
    KINDS,
    RED,
    REFUSED,
    Architecture,
    Cell,
)
from integration_tests.models.architectures.kept import told

_CLASS = re.compile(r"\b[A-Z]\w*(?:ForCausalLM|LMHeadModel|LM|Decoder|ForConditionalGeneration)\b")


def with_found(table: Table, found: Iterable[Architecture]) -> Table:
    """A table in which rows take the place of those there are.

    Args:
        table: What there is.
        found: What was found; of all the same versions.
    """
    texts = {name: dict(table.cells(name)) for name in table.rows}
    rows, versions = dict(table.rows), table.versions
    for one in found:
        known = texts.get(one.name, {}) if rows.get(one.name, Row()).digest == one.digest else {}
        texts[one.name] = {**known, **{cell.kind: _text(cell) for cell in one.cells}}
        bounds = [cell.reason for cell in one.cells if cell.state == EQUAL and cell.bound != BOUND]
        seconds = one.seconds + sum(cell.seconds for cell in one.cells)
        rows[one.name] = Row(
            digest=one.digest,
            note=one.reference or one.reason,
            bound=next(iter(bounds), ""),
            seconds=round(seconds, 1),
        )
        versions = one.versions
    reasons: dict[str, int] = {}
    made = {}
    for name in sorted(rows):
        cells = [texts[name].get(kind) for kind in KINDS] if texts[name] else []
        short = [
            f"#{reasons.setdefault(cell, len(reasons))}" if isinstance(cell, str) else cell
            for cell in cells
        ]
        made[name] = msgspec.structs.replace(rows[name], cells=tuple(short))
    return Table(versions=versions, kinds=tuple(KINDS), reasons=tuple(reasons), rows=made)


def encoded(table: Table) -> bytes:
    """A table as JSON, a line for each row, so that changes of it can be read."""
    head = msgspec.to_builtins(table)
    rows = head.pop("rows")
    lines = [f"{_json(key)}: {_json(value)}," for key, value in head.items() if key != "reasons"]
    lines += ['"reasons": [', ",\n".join(map(_json, table.reasons)), "],", '"rows": {']
    lines += [",\n".join(f"{_json(name)}: {_json(row)}" for name, row in rows.items())]
    return "\n".join(["{", *lines, "}", "}", ""]).encode()


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _text(cell: Cell) -> float | str | None:
    if cell.state == EQUAL and cell.error is not None:
        return float(told(cell.error))
    if cell.state == REFUSED:
        return _CLASS.sub("the model", cell.reason)  # so that many have one reason
    if cell.state in RED:
        worst = f"{cell.worst} by {told(cell.error)}" if cell.compared else ""
        return DIFFERENT + "; ".join(filter(None, [worst, cell.reason]))
    return None
