"""Which ranks run the same program: one of them stands for all. Arithmetic alone, no torch.

Ranks differ by what they hold and by what is asked of them: the stages of the pipeline, the sizes
of their parts of parameters, whether they speak for a parameter that others have too, their part of
a sequence in a ring, the rows that experts get. All else is the same code with the same shapes.
"""

from collections.abc import Hashable, Sequence

from hp_train.config import Config
from hp_train.costs.modules import Weight, stage
from hp_train.dry_run.routing import Skew, rows_per_rank
from hp_train.layout.cuts import HIDDEN_DIM, chunk, cut_dim, name_in_block
from hp_train.layout.ranks import Axis, Layout, StageLayout
from hp_train.layout.schedules import KINDS, count_stages, placement, split_layers

_COPIED: tuple[Axis, ...] = ("dp_replicate", "tp", "expert_replicate", "etp")
"""Axes along which ranks have copies of some parameter: the first of them speaks for it."""


def classes_of(
    config: Config, skew: Skew, *, vocab_size: int, apart: Sequence[int] = ()
) -> dict[int, tuple[int, ...]]:
    """The lowest rank of each class, and all ranks of the class.

    Args:
        config: Config of the run.
        skew: Model of the routing: it decides how many rows the experts of a rank get.
        vocab_size: Tokens of the vocabulary, the rows of the embedding.
        apart: Global ranks that get a class of their own.
    """
    layout = Layout.of(config.mesh)
    found: dict[Hashable, list[int]] = {}
    for index, place in enumerate(layout.stages):
        weights = _weights(config, index, vocab_size)
        sizes: dict[tuple[int, ...], Hashable] = {}
        for rank in place.members:
            at = tuple(place.index(rank, axis) for axis in ("tp", "ep", "etp"))
            shards = place.index(rank, "dp_shard", "cp"), place.index(rank, "expert_shard")
            key = (*at, *shards)
            if key not in sizes:
                sizes[key] = tuple(_local_shape(weight, place, key) for weight in weights)
            kind = (
                index,
                sizes[key],
                tuple(place.index(rank, axis) == 0 for axis in _COPIED),
                _position(config, layout, place, rank),
                _load(config, skew, place, at[1]),
                rank if rank in apart else -1,
            )
            found.setdefault(kind, []).append(rank)
    return {ranks[0]: tuple(ranks) for ranks in sorted(found.values())}


def _weights(config: Config, pp_index: int, vocab_size: int) -> list[Weight]:
    """The different parameters of a pipeline rank."""
    num_stages = count_stages(config)
    layers = split_layers(config.model.num_layers, num_stages)
    places = placement(config.pipeline, num_ranks=config.mesh.pp)
    weights: dict[Hashable, Weight] = {}
    for index in (index for index, place in enumerate(places) if place == pp_index):
        work = stage(
            config,
            vocab_size,
            layers=layers[index],
            first=index == 0,
            last=index == num_stages - 1,
        )
        for weight in work.weights:
            weights[name_in_block(weight.name), weight.shape] = weight
    return list(weights.values())


def _local_shape(weight: Weight, place: StageLayout, at: Sequence[int]) -> tuple[int, ...]:
    """Shape of what a rank has of a parameter; see `hp_train.model.parallelize`.

    Args:
        weight: The whole parameter.
        place: Stage of the rank, with the axes that cut the parameter.
        at: Indices of the rank along tp, ep, etp, of its dense shard and of its expert shard.
    """
    tp, ep, etp, shard, expert_shard = at
    shape = list(weight.shape)

    def cut(dim: int | None, ranks: int, index: int) -> None:
        if dim is not None and ranks > 1:
            shape[dim] = len(chunk(range(shape[dim]), ranks, index))

    if weight.is_expert:
        cut(0, place.ep, ep)
        cut(HIDDEN_DIM.get(weight.name.rpartition(".")[2]), place.etp, etp)
        inside = shape[0] < place.expert_shard and shape[1] % place.expert_shard == 0
        cut(int(inside), place.expert_shard, expert_shard)
    else:
        cut(cut_dim(weight.name), place.tp, tp)
        cut(0, place.fsdp, shard)
    return tuple(shape)


def _position(config: Config, layout: Layout, place: StageLayout, rank: int) -> tuple[int, ...]:
    """Where it matters to which part of a sequence a rank attends, or whom it sends a slice to."""
    keys_travel = config.mesh.heads_degree < config.mesh.cp
    slices_meet = not layout.is_even or KINDS[config.pipeline.schedule].returns
    return (
        place.index(rank, "cp") if keys_travel else -1,
        place.index(rank, "tp") if slices_meet else -1,
    )


def _load(config: Config, skew: Skew, place: StageLayout, ep_index: int) -> Hashable:
    """Slots of each local expert and rows of the rank, by layer."""
    model = config.model
    if place.ep == 1 or not model.num_experts:
        return None
    tokens = config.train.microbatch_size * config.data.seq_len // (place.cp * place.tp)
    num_local = model.num_experts // place.ep
    loads = []
    for layer in skew.layers:
        slots = skew.slots(
            layer,
            num_tokens=tokens,
            top_k=model.top_k,
            num_experts=model.num_experts,
            num_ranks=place.ep,
        )
        rows = rows_per_rank(slots, tokens, model.top_k, place.ep)
        loads.append((slots[ep_index * num_local :][:num_local], rows[ep_index]))
    return tuple(loads)
