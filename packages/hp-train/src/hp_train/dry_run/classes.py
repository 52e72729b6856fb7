"""Classes of ranks that run the same program, of which one stands for all. No torch here.

Ranks differ by what they hold and by what is asked of them: the stages of the pipeline, the sizes
of their parts of parameters, whether they speak for a parameter that others have too, their part of
a sequence in a ring, the rows that experts get. All else is the same code with the same shapes.
"""

from collections.abc import Hashable, Sequence

from hp_plan.costs.modules import stage
from hp_plan.costs.routing import Skew, rows_per_rank
from hp_plan.costs.work import Weight
from hp_trainer.config import Config
from hp_trainer.layout.parameter import local_shape
from hp_trainer.layout.ranks import Axis, Layout, StageLayout
from hp_trainer.layout.schedules import KINDS, layers_of_stages, placement

_COPIED: tuple[Axis, ...] = ("dp_replicate", "tp", "expert_replicate", "etp")
"""Axes along which ranks have copies of some parameter: the first of them speaks for it."""

_CUTTING: tuple[Axis, ...] = ("tp", "ep", "etp", "expert_shard")


def classes_of(
    config: Config, skew: Skew, *, vocab_size: int, apart: Sequence[int] = ()
) -> dict[int, tuple[int, ...]]:
    """Return the lowest rank of each class, and all ranks of the class.

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
            at: dict[str, int] = {axis: place.index(rank, axis) for axis in _CUTTING}
            at["fsdp"] = place.index(rank, "dp_shard", "cp")
            key = tuple(at.values())
            if key not in sizes:
                sizes[key] = tuple(local_shape(w.shape, w.spec, place, at) for w in weights)
            kind = (
                index,
                sizes[key],
                tuple(place.index(rank, axis) == 0 for axis in _COPIED),
                _position(config, layout, place, rank),
                _load(config, skew, place, at["ep"]),
                rank if rank in apart else -1,
            )
            found.setdefault(kind, []).append(rank)
    return {ranks[0]: tuple(ranks) for ranks in sorted(found.values())}


def _weights(config: Config, pp_index: int, vocab_size: int) -> list[Weight]:
    """Return the different parameters of a pipeline rank."""
    layers = layers_of_stages(config)
    works = (
        stage(
            config,
            vocab_size,
            layers=layers[index],
            first=index == 0,
            last=index == len(layers) - 1,
        )
        for index, place in enumerate(placement(config.pipeline, num_ranks=config.mesh.pp))
        if place == pp_index
    )
    return list({(w.shape, w.spec): w for work in works for w in work.weights}.values())


def _position(config: Config, layout: Layout, place: StageLayout, rank: int) -> tuple[int, ...]:
    """Return a rank's cp and tp indices; -1 for each that changes nothing in its program."""
    keys_travel = config.mesh.heads_degree < config.mesh.cp
    slices_meet = not layout.is_even or KINDS[config.pipeline.schedule].returns
    return (
        place.index(rank, "cp") if keys_travel else -1,
        place.index(rank, "tp") if slices_meet else -1,
    )


def _load(config: Config, skew: Skew, place: StageLayout, ep_index: int) -> Hashable:
    """Return slots of each local expert and rows of the rank, by layer."""
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
