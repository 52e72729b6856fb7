"""What is found of an architecture in each layout, as data: one file for each. No torch."""

from typing import Any

import msgspec

EQUAL, REFUSED, DIFFERENT, FAILED, WITHOUT = (
    "equal",
    "refused",
    "different",
    "failed",
    "no experts",
)
"""States of a cell. `REFUSED`: hp-train says before it trains why it does not. `FAILED`: it began
and broke, which is a mistake as `DIFFERENT` is one."""
RED = (DIFFERENT, FAILED)
BOUND = 1e-12
"""Largest relative error of what is called equal, in float64."""


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """A column: a layout of hp-train.

    Attributes:
        ranks: Processes.
        keys: What its config has besides those of all.
        needs_experts: Whether it is only about models that have some.
    """

    ranks: int
    keys: dict[str, Any]
    needs_experts: bool = False


def _pipeline(schedule: str) -> Kind:
    return Kind(ranks=2, keys={"mesh.pp": 2, "pipeline.schedule": schedule})


SIZES = (1, 2, 4)
"""Sequences of a microbatch, of which experts are balanced together."""
PACKED = 2
"""Those where a sequence has several documents."""
_WHOLE = {"train.microbatch_size": 4}
_HALF = {"train.microbatch_size": 2}
_BLOCKS = {"mesh.gather": "block"}

KINDS = {
    "one process": Kind(ranks=1, keys={}),
    "recompute": Kind(ranks=1, keys={"train.recompute": "full", **_HALF}),
    "packed": Kind(ranks=1, keys={"data.documents": "separate", **_HALF}),
    "fsdp 2": Kind(ranks=2, keys={"mesh.dp_shard": 2, **_BLOCKS}),
    "pp 2 gpipe": _pipeline("gpipe"),
    "pp 2 1f1b": _pipeline("1f1b"),
    "pp 2 zero bubble": _pipeline("zero_bubble"),
    "tp 2": Kind(ranks=2, keys={"mesh.tp": 2, **_WHOLE}),
    "cp 2 heads": Kind(ranks=2, keys={"mesh.cp": 2, **_WHOLE}),
    "cp 2 gather": Kind(ranks=2, keys={"mesh.cp": 2, "mesh.cp_heads": 1, **_HALF}),
    "cp 2 ring": Kind(ranks=2, keys={"mesh.cp": 2, "mesh.cp_ring": True, **_WHOLE}),
    "ep 2": Kind(ranks=2, keys={"mesh.dp_shard": 2, "mesh.ep": 2, **_HALF}, needs_experts=True),
    "tp 2 x ep 2": Kind(ranks=2, keys={"mesh.tp": 2, "mesh.ep": 2, **_WHOLE}, needs_experts=True),
    "hsdp 2 x 2": Kind(ranks=4, keys={"mesh.dp_replicate": 2, "mesh.dp_shard": 2, **_BLOCKS}),
    "pp 2 x fsdp 2": Kind(
        ranks=4, keys={"mesh.pp": 2, "mesh.dp_shard": 2, "pipeline.schedule": "1f1b"}
    ),
}


class Cell(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An architecture in a layout.

    Attributes:
        kind: Key of `KINDS`.
        state: One of those above.
        error: Largest relative error of all that was compared; None: it is not finite.
        worst: What has it.
        compared: Tensors and numbers that were compared.
        bound: Largest error that is equal, where it is not `BOUND`.
        reason: Why it was refused, failed, differs, or has a bound of its own.
        seconds: CPU seconds of all ranks.
    """

    kind: str
    state: str
    error: float | None = 0.0
    worst: str = ""
    compared: int = 0
    bound: float = BOUND
    reason: str = ""
    seconds: float = 0.0


class Architecture(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An architecture in all layouts.

    Attributes:
        name: Its type in transformers, or the name of its folder.
        versions: What has computed it.
        digest: Stands for the files of its code.
        cells: One for each layout; none: it does not even train in one process.
        reason: Why not.
        reference: What the reference could not do as all others do, in words.
        fields: Fields of its tiny config.
        seconds: CPU seconds of the reference.
    """

    name: str
    versions: dict[str, str]
    digest: str = ""
    cells: tuple[Cell, ...] = ()
    reason: str = ""
    reference: str = ""
    fields: dict[str, Any] = {}
    seconds: float = 0.0

    def cell(self, kind: str) -> Cell | None:
        """What was found in a layout."""
        return next((cell for cell in self.cells if cell.kind == kind), None)
