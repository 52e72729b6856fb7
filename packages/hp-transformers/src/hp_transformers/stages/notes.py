"""Warnings about a model of transformers in the first lines of a run."""

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from hp_checkpoint.weight_files import first_of
from hp_platform.dry_device import is_dry
from hp_trainer.config import Config, PipelineConfig
from hp_trainer.layout.schedules import KINDS as SCHEDULES
from hp_transformers.families.config import read_config
from hp_transformers.stages.load import left_out
from hp_transformers.stages.proven import DIFFERENT, read_table


def notes(config: Config) -> list[str]:
    """Return warnings for the first lines of a run of `model.transformers`; none of another run.

    They name the parts of the layout that were never compared with one process of transformers, and
    weights in files that are not trained.

    Args:
        config: Config of the run.
    """
    if not config.model.transformers:
        return []
    folder = Path(config.model.transformers)
    lines = doubts(str(read_config(folder).get("model_type")), config, version("transformers"))
    if not (config.run.resume or is_dry()) and (names := left_out(config.model)):
        lines.append(
            f"warning: {first_of(names)} of {folder} are of no part of the model in "
            "transformers: they are not trained"
        )
    return lines


def doubts(model_type: str, config: Config, transformers: str) -> list[str]:
    """Return a warning for each part of a run that was never compared with plain transformers.

    Args:
        model_type: Type of the model.
        config: Config of the run.
        transformers: Installed version of transformers.
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
    """Yield the kinds of the table that a layout combines."""
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
    """Return the schedule of a pipeline, as kinds name it."""
    alone = SCHEDULES[pipeline.schedule].with_one_stage if pipeline.stages_per_rank == 1 else ""
    return (alone or pipeline.schedule).replace("_", " ")
