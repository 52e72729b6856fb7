"""The table of architectures that were compared with plain transformers. No torch."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

TABLE = Path(__file__).with_name("proven.json")
DIFFERENT = "different: "
"""Prefix of the text of a cell that was neither equal nor refused."""


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The row of an architecture.

    Attributes:
        digest: Digest of the files of its code in transformers.
        cells: One cell for each kind of the table. A number: equal, with that error. A text, `#`
            and the index of a reason: refused, or different. None: the kind does not apply, or was
            not run.
        note: Special feature of the reference; without cells, the reason why it does not train.
        bound: Reason why errors above the usual bound count as equal.
        seconds: CPU seconds of the comparison.
    """

    digest: str = ""
    cells: tuple[float | str | None, ...] = ()
    note: str = ""
    bound: str = ""
    seconds: float = 0.0


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """All architectures.

    Attributes:
        versions: Versions of transformers, torch and hp-train that computed the table.
        kinds: Kinds of layouts, the columns.
        reasons: Texts of cells.
        rows: Rows by the type of their model.
    """

    versions: dict[str, str] = {}
    kinds: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    rows: dict[str, Row] = {}

    def cells(self, name: str) -> Mapping[str, float | str | None]:
        """Return the cells of an architecture, with their whole texts, by kind."""
        row = self.rows.get(name, Row())
        return {
            kind: self.reasons[int(cell[1:])] if isinstance(cell, str) else cell
            for kind, cell in zip(self.kinds, row.cells, strict=False)
        }


def read_table() -> Table:
    """Return the table; an empty one if its file is missing."""
    if not TABLE.exists():
        return Table()
    return msgspec.json.decode(TABLE.read_bytes(), type=Table)
