"""What does not go with steps that are planned from the lengths of their documents."""

from collections.abc import Iterator

from hp_base.messages import shown
from hp_trainer.config import Config
from hp_trainer.layout.schedules import KINDS


def planned_rules(config: Config) -> Iterator[str]:
    """A plan says what microbatches are, on which ranks, and in which order stages take them."""
    data = config.data
    if data.packing != "planned":
        for key, empty in (("plan_tokens", 0), ("plan_costs", "")):
            if (value := getattr(data, key)) != empty:
                yield (
                    f"data.{key} ({shown(value)}) must be {shown(empty)} with data.packing "
                    f"({shown(data.packing)})"
                )
        return
    yield from _order(config)
    yield from _layout(config)
    least = data.seq_len // config.mesh.cp
    if 0 < data.plan_tokens < least:
        yield (
            f"data.plan_tokens ({data.plan_tokens}) must be at least data.seq_len "
            f"({data.seq_len}) / mesh.cp ({config.mesh.cp}) = {least}: a document may be as long"
        )


def _order(config: Config) -> Iterator[str]:
    """Stages are one on each rank, and the plan has their order."""
    pipeline = config.pipeline
    why = 'with data.packing ("planned"): the plan has the order of microbatches'
    if pipeline.stages_per_rank != 1:
        yield f"pipeline.stages_per_rank ({pipeline.stages_per_rank}) must be 1 {why}"
    elif KINDS[pipeline.schedule].returns:
        others = " or ".join(
            each.name for each in KINDS.values() if not each.returns and each.stages_per_rank != 2
        )
        yield f"pipeline.schedule ({shown(pipeline.schedule)}) must be {others} {why}"
    if pipeline.overlap:
        yield f"pipeline.overlap (true) must be false {why}"
    if pipeline.retention != "keep":
        yield f"pipeline.retention ({shown(pipeline.retention)}) must be {shown('keep')} {why}"


def _layout(config: Config) -> Iterator[str]:
    """Stages are equal, documents are dealt out by the plan, and shapes differ."""
    mesh, with_plan = config.mesh, 'with data.packing ("planned")'
    if mesh.stage_tp:
        yield (
            f"mesh.stage_tp ({shown(mesh.stage_tp)}) must be [] {with_plan}: stages are planned "
            "as equal ones"
        )
    if mesh.cp_deal:
        yield f"mesh.cp_deal (true) must be false {with_plan}, which deals out documents itself"
    if config.model.is_own:
        yield (
            f"data.packing ({shown(config.data.packing)}) must be stream or best_fit with "
            f"{config.model.origin}: what it balances and where it counts positions is not known"
        )
    if config.train.compile != "none":
        yield (
            f"train.compile ({shown(config.train.compile)}) must be {shown('none')} {with_plan}: "
            "every microbatch has another length, and graphs would be compiled for each"
        )
