"""The pipeline: its stages, its pairs of a forward and a backward, and what fills it."""

from collections.abc import Iterator

from hp_base.messages import shown
from hp_trainer.config import Config
from hp_trainer.config.rules.hints import DATA_AXES, near_multiples, shown_factors
from hp_trainer.layout.schedules import (
    KINDS,
    compute_schedule,
    count_microbatches,
    count_stages,
)


def pipeline_rules(config: Config) -> Iterator[str]:
    """Yield why stages are too many or too few for the schedule or the layers."""
    mesh, pipeline, model = config.mesh, config.pipeline, config.model
    num_stages = count_stages(config)
    only = KINDS[pipeline.schedule].stages_per_rank
    if only and pipeline.stages_per_rank != only:
        yield (
            f"pipeline.stages_per_rank ({pipeline.stages_per_rank}) must be {only} "
            f"with pipeline.schedule ({shown(pipeline.schedule)})"
        )
    more = " + 1" if KINDS[pipeline.schedule].returns else ""
    stages = (
        f"mesh.pp ({mesh.pp}) x pipeline.stages_per_rank ({pipeline.stages_per_rank}){more} = "
        f"{num_stages}"
    )
    if model.num_layers < num_stages:
        yield f"model.num_layers ({model.num_layers}) must be at least {stages}"
    cut = pipeline.stage_layers
    if cut and (len(cut) != num_stages or sum(cut) != model.num_layers):
        yield (
            f"pipeline.stage_layers ({shown(cut)}) must have a number for each of {stages} "
            f"stages, which sum to model.num_layers ({model.num_layers})"
        )
    sizes, ends_elsewhere = mesh.stage_tp, KINDS[pipeline.schedule].style == "loop"
    if model.tie_embeddings and ends_elsewhere and sizes and sizes[0] != sizes[-1]:
        yield (
            f"model.tie_embeddings (true) must be false with mesh.stage_tp ({shown(sizes)}): the "
            f"first size ({sizes[0]}) must equal the last ({sizes[-1]})"
        )


def overlap_rules(config: Config) -> Iterator[str]:
    """Yield why a forward and a backward cannot be overlapped: exchanges or compute are missing."""
    if not config.pipeline.overlap:
        return
    mesh, pipeline, model, train = config.mesh, config.pipeline, config.model, config.train
    must_be_off = "pipeline.overlap (true) must be false with"
    if model.transformers and train.recompute != "none":
        yield (
            f"{must_be_off} {model.origin} and train.recompute ({shown(train.recompute)}): a "
            "backward would cast weights of a block again while a forward computes with them"
        )
    if mesh.ep_buffer:
        yield f"mesh.ep_buffer ({mesh.ep_buffer:g}) must be 0 with pipeline.overlap (true)"
    if not KINDS[pipeline.schedule].pairs:
        having = " or ".join(name for name, kind in KINDS.items() if kind.pairs)
        yield (
            f"{must_be_off} pipeline.schedule ({shown(pipeline.schedule)}): only {having} can have "
            "a forward and a backward as one step"
        )
    if max(mesh.stage_ep, default=mesh.ep) == 1:
        yield f"{must_be_off} mesh.ep (1): experts of one rank exchange nothing to be hidden"
    if mesh.etp > 1:
        yield (
            f"{must_be_off} mesh.etp ({mesh.etp}): parts of an expert's output are summed before "
            "their exchange returns, which would be waited for"
        )
    if not model.has_experts:
        yield (
            f"{must_be_off} model.num_experts ({model.num_experts}) and model.num_dense_layers "
            f"({model.num_dense_layers}): no layer has experts"
        )
    if train.global_batch_size == config.batch_unit:
        yield (
            f"{must_be_off} train.global_batch_size ({train.global_batch_size}) = "
            f"{shown_factors(mesh, *DATA_AXES)} x train.microbatch_size ({train.microbatch_size}): "
            "one microbatch has no other one to hide behind"
        )


def retention_rules(config: Config) -> Iterator[str]:
    """Yield why a rank cannot get by with the microbatches that it keeps."""
    mesh, pipeline = config.mesh, config.pipeline
    if pipeline.retention == "keep":
        return
    if mesh.gather == "block":
        yield (
            f"pipeline.retention ({shown(pipeline.retention)}) must be {shown('keep')} with "
            f"mesh.gather ({shown('block')}): parameters come and go inside a forward, which would "
            "be copied away with what it keeps; train.recompute goes by block"
        )
        return
    schedule = compute_schedule(
        pipeline, num_ranks=mesh.pp, num_microbatches=count_microbatches(config)
    )
    if schedule is None:
        yield (
            f"pipeline.keep_microbatches ({pipeline.keep_microbatches}) must be larger with "
            f"pipeline.schedule ({shown(pipeline.schedule)}) and pipeline.retention "
            f"({shown(pipeline.retention)}): what waits for its backward cannot all be given up"
        )


def gather_rules(config: Config) -> Iterator[str]:
    """Yield why parameters cannot be gathered by block: a backward must be whole and alone."""
    mesh, pipeline = config.mesh, config.pipeline
    if mesh.gather != "block":
        return
    must_be = f"mesh.gather ({shown(mesh.gather)}) must be {shown('stage')} with"
    if KINDS[pipeline.schedule].splits_backward:
        yield (
            f"{must_be} pipeline.schedule ({shown(pipeline.schedule)}): weight gradients would be "
            "computed when the parameters of a block are gone, and not be reduced"
        )
    if pipeline.overlap:
        yield (
            f"{must_be} pipeline.overlap (true): a forward would free what a backward of the same "
            "block computes with"
        )


def recompute_rules(config: Config) -> Iterator[str]:
    """Yield what runs again must be something whose inside is known and seen."""
    train, model = config.train, config.model
    if model.is_own and train.recompute not in ("none", "full"):
        yield (
            f"train.recompute ({shown(train.recompute)}) must be none or full with {model.origin}"
        )
    if train.recompute == "selective" and train.compile != "none":
        yield (
            f"train.compile ({shown(train.compile)}) must be {shown('none')} with "
            f"train.recompute ({shown('selective')}): operators inside of compiled graphs are not "
            "seen, and all of them would run again"
        )


def batch_rules(config: Config) -> Iterator[str]:
    """Yield why microbatches of all ranks do not make up a batch."""
    train, mesh, unit, data = config.train, config.mesh, config.batch_unit, config.data
    if data.packing != "stream" and data.documents != "separate":
        yield (
            f"data.documents ({shown(data.documents)}) must be {shown('separate')} with "
            f"data.packing ({shown(data.packing)}): whole documents, and padding, would be "
            "taken for one"
        )
    if mesh.cp_deal and train.microbatch_size > 1:
        yield (
            f"train.microbatch_size ({train.microbatch_size}) must be 1 with mesh.cp_deal "
            "(true): each sequence is dealt out in its own way"
        )
    if train.global_batch_size % unit:
        yield (
            f"train.global_batch_size ({train.global_batch_size}) must be a multiple of "
            f"{shown_factors(mesh, *DATA_AXES)} x train.microbatch_size ({train.microbatch_size}) "
            f"= {unit}{near_multiples(train.global_batch_size, unit)}"
        )


def planned_rules(config: Config) -> Iterator[str]:
    """Yield what does not go with steps that are planned from the lengths of their documents."""
    data = config.data
    if data.packing != "planned":
        for key, empty in (("plan_tokens", 0), ("plan_costs", "")):
            if (value := getattr(data, key)) != empty:
                yield (
                    f"data.{key} ({shown(value)}) must be {shown(empty)} with data.packing "
                    f"({shown(data.packing)})"
                )
        return
    yield from _order_of_plan(config)
    yield from _layout_of_plan(config)
    least = data.seq_len // config.mesh.cp
    if 0 < data.plan_tokens < least:
        yield (
            f"data.plan_tokens ({data.plan_tokens}) must be at least data.seq_len "
            f"({data.seq_len}) / mesh.cp ({config.mesh.cp}) = {least}: a document may be as long"
        )


def _order_of_plan(config: Config) -> Iterator[str]:
    """Yield what a plan excludes since it has the order of microbatches itself."""
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


def _layout_of_plan(config: Config) -> Iterator[str]:
    """Yield what a plan excludes since it has equal stages and documents of all lengths."""
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
