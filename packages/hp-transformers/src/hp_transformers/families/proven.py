"""The table of architectures that were compared with plain transformers. No torch."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from hp_trainer.config import Config, PipelineConfig
from hp_trainer.layout.schedules import KINDS as SCHEDULES

TABLE = Path(__file__).with_name("proven.json")
DIFFERENT = "different: "
"""How the text of a cell begins that was neither equal nor refused."""


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An architecture.

    Attributes:
        digest: Stands for the files of its code in transformers.
        cells: One for each kind of the table. A number: it was equal, with that error. A text: it
            was refused, or is different; `#` and the index of a reason. None: the kind is not
            about it, or nobody has looked.
        note: What is special about its reference; without cells, why it does not train.
        bound: Why errors above the bound of all are equal.
        seconds: CPU seconds that it took.
    """

    digest: str = ""
    cells: tuple[float | str | None, ...] = ()
    note: str = ""
    bound: str = ""
    seconds: float = 0.0


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """All architectures.

    Attributes:
        versions: What has computed it: transformers, torch, hp-train.
        kinds: Kinds of layouts, the columns.
        reasons: Texts of cells.
        rows: Architectures by their type.
    """

    versions: dict[str, str] = {}
    kinds: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    rows: dict[str, Row] = {}

    def cells(self, name: str) -> Mapping[str, float | str | None]:
        """Cells of an architecture, with their whole texts, by kind."""
        row = self.rows.get(name, Row())
        return {
            kind: self.reasons[int(cell[1:])] if isinstance(cell, str) else cell
            for kind, cell in zip(self.kinds, row.cells, strict=False)
        }


def read_table() -> Table:
    """Read the table; without one, an empty one."""
    if not TABLE.exists():
        return Table()
    return msgspec.json.decode(TABLE.read_bytes(), type=Table)


def doubts(model_type: str, config: Config, transformers: str) -> list[str]:
    """Say what was never compared with one process of transformers, in lines; none: all of it was.

    Args:
        model_type: Type of the model.
        config: Config of the run.
        transformers: Version that is installed.
    """
    table = read_table()
    if model_type not in table.rows:
        return [f"warning: {model_type} was never compared with transformers"]
    found = []
    known = table.versions.get("transformers", "")
    if transformers != known:
        found.append(
            f"warning: {model_type} was compared with transformers {known}, not {transformers}"
        )
    cells = table.cells(model_type)
    for kind in _kinds_of(config):
        if (cell := cells.get(kind)) is None:
            found.append(f"warning: {model_type} was never compared with transformers under {kind}")
        elif isinstance(cell, str) and cell.startswith(DIFFERENT):
            found.append(f"warning: {model_type} under {kind} is {cell}")
    return found


def _kinds_of(config: Config) -> Iterator[str]:
    """Kinds of the table that a layout is made of."""
    mesh = config.mesh
    yield "one process"
    if config.data.documents == "separate":
        yield "packed"
    if config.train.recompute != "none":
        yield "recompute"
    if mesh.dp_shard > 1:
        yield "hsdp 2 x 2" if mesh.dp_replicate > 1 else "fsdp 2"
    if mesh.pp > 1:
        yield f"pp 2 {_schedule_of(config.pipeline)}"
    if mesh.tp > 1:
        yield "tp 2 x ep 2" if mesh.ep > 1 else "tp 2"
    if mesh.cp > 1:
        yield "cp 2 " + ("heads" if mesh.heads_degree > 1 else "ring" if mesh.cp_ring else "gather")
    if mesh.ep > 1 and mesh.tp == 1:
        yield "ep 2"


def _schedule_of(pipeline: PipelineConfig) -> str:
    """The schedule that a pipeline runs, as kinds call it."""
    alone = SCHEDULES[pipeline.schedule].with_one_stage if pipeline.stages_per_rank == 1 else ""
    return (alone or pipeline.schedule).replace("_", " ")
