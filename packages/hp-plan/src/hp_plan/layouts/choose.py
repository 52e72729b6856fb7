"""Compare all layouts of a number of devices and say why the best is best. No torch."""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from hp_base.errors import ConfigError
from hp_plan.costs import modules
from hp_plan.costs.machine import Machine
from hp_plan.layouts.searching import Search
from hp_plan.price.estimate import Estimate, Plan
from hp_plan.price.gather import fits, room
from hp_plan.price.prices import Prices
from hp_plan.price.traffic import Spread
from hp_trainer.config import Config
from hp_trainer.config.space import Axis, enumerate_meshes
from hp_trainer.layout.schedules import layers_of_stages

_MESH = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")


@dataclass(frozen=True, slots=True)
class Choice:
    """Layouts of a number of devices, compared.

    Attributes:
        best: Those that fit into memory, the fastest first.
        too_large: The one that lacks least of those that do not fit; None if all looked at fit.
        num_meshes: Those that the rules allow.
        num_priced: Layouts whose stages were priced.
        num_laid_out: Layouts whose schedules were walked step by step.
        is_complete: Whether no other one is among the best; else there were too many to lay out.
    """

    best: tuple[Estimate, ...]
    too_large: Estimate | None
    num_meshes: int
    num_priced: int
    num_laid_out: int
    is_complete: bool


def plan_axes(config: Config, num_devices: int) -> tuple[Axis, ...]:
    """Say what layouts are made of: every divisor of the number of devices for every mesh axis."""
    divisors = tuple(n for n in range(1, num_devices + 1) if num_devices % n == 0)
    of_experts = divisors if config.model.has_experts else (1,)
    sizes_of = dict.fromkeys(_MESH, divisors) | dict.fromkeys(("ep", "etp"), of_experts)
    if config.model.transformers:
        for axis in ("pp", "tp", "ep"):
            sizes_of[axis] = tuple(n for n in sizes_of[axis] if _can_be_cut(config, axis, n))
        sizes_of["etp"] = (1,)
    mesh = tuple(Axis(f"mesh.{axis}", sizes) for axis, sizes in sizes_of.items())
    sizes = tuple(size for size in (1, 2, 4, 8, 16) if size <= config.train.global_batch_size)
    return (
        *mesh,
        Axis("pipeline.schedule"),
        Axis("pipeline.stages_per_rank", (1, 2, 3, 4)),
        Axis("train.microbatch_size", tuple(sorted({*sizes, config.train.microbatch_size}))),
        Axis("train.recompute", _recomputes(config)),
    )


def _can_be_cut(config: Config, axis: str, size: int) -> bool:
    """Say if so many ranks can share a model of transformers, which says so when it is made."""
    mesh = replace(config.mesh, **{"pp": 1, "tp": 1, "ep": 1, axis: size})
    if axis == "ep" and config.model.num_experts % size:
        return False
    try:
        if axis == "pp" and size > 1:
            modules.require_stages(config)
        modules.whole_model(replace(config, mesh=mesh), config.model.vocab_size)
    except ConfigError:
        return False
    return True


def _recomputes(config: Config) -> tuple[str, ...]:
    """Return what of blocks may run again; not what the rules refuse of all layouts alike."""
    ways = ["none", "full", config.train.recompute]
    if not config.model.is_own and config.train.compile == "none":
        ways.insert(1, "selective")
    return tuple(dict.fromkeys(ways))


def choose(
    config: Config,
    num_devices: int,
    machine: Machine,
    *,
    vocab_size: int,
    count: int = 5,
    most: int = 20_000,
    spread: Spread | None = None,
) -> Choice:
    """Find the fastest layouts that fit into memory, of those whose stages have the same sizes.

    They keep all microbatches under way: another mesh or recomputation has always been faster.

    Layouts are laid out in the order of a bound that none of them can undercut, until the next
    bound is above what was found; so none that was left out can be better, unless there are so many
    that the search ends before. Layouts of a mesh are not looked at before its own bound comes up.

    Args:
        config: Everything but the layout and the microbatch size comes from it.
        num_devices: Number of devices; all of them are used.
        machine: What they do.
        vocab_size: Tokens of the vocabulary, the rows of the embedding.
        count: How many to find.
        most: How many to lay out at most.
        spread: Where the experts of a token are; see `Plan`.

    Raises:
        ConfigError: When no layout is allowed, or none fits.
    """
    config = replace(
        config,
        launch=replace(config.launch, num_processes=0),
        mesh=replace(config.mesh, stage_tp=(), stage_ep=(), gather="stage"),
        pipeline=replace(config.pipeline, retention="keep", stage_layers=()),
    )
    axes = plan_axes(config, num_devices)
    processes = range(num_devices, num_devices + 1)
    meshes = [mesh for _, mesh in enumerate_meshes(config, num_processes=processes, axes=axes)]
    if not meshes:
        raise ConfigError(f"no layout of {num_devices} processes is allowed for this config")
    search = Search(axes, Prices(machine, vocab_size, spread or Spread()), most=most)

    laid_out = partial(Plan, machine=machine, vocab_size=vocab_size, prices=search.prices)
    found: list[Estimate] = []
    large: list[Estimate] = []
    for least, layout in search.by_time(meshes):
        if len(found) >= count and found[count - 1].seconds <= least:
            break
        estimate = laid_out(layout).estimate()
        if fits(layout, estimate.memory.total, machine):
            _put(found, estimate)
        else:
            large.append(estimate)
    if not large and (smallest := search.nearest()) is not None:
        large.append(laid_out(smallest).estimate())
    nearest = min(large, key=lambda estimate: estimate.memory.total, default=None)
    if not found:
        assert nearest is not None
        raise ConfigError(
            f"no layout of {num_devices} processes fits: {nearest.memory.total / 1e9:.1f} GB "
            f"must be at most the memory of a device ({room(nearest.config, machine) / 1e9:.1f} GB)"
        )
    best = [_evened(estimate, laid_out) for estimate in found[:count]]
    return Choice(
        best=tuple(sorted(best, key=lambda estimate: estimate.seconds)),
        too_large=nearest,
        num_meshes=len(meshes),
        num_priced=search.num_priced,
        num_laid_out=search.num_laid_out,
        is_complete=search.is_complete,
    )


def _evened(best: Estimate, laid_out: Callable[[Config], Plan]) -> Estimate:
    """Move layers one by one from the stage that takes longest to the one that takes least.

    The last stage also has the output matrix and the loss, the first the embedding.
    """
    sizes, plan = [len(layers) for layers in layers_of_stages(best.config)], laid_out(best.config)
    while plan.layout.pp > 1 and max(sizes) > 1:
        took = [price.forward + price.input_grad + price.weight_grad for price in plan.prices]
        most = max(range(len(sizes)), key=lambda stage: (sizes[stage] > 1, took[stage]))
        sizes[most] -= 1
        sizes[took.index(min(took))] += 1
        pipeline = replace(best.config.pipeline, stage_layers=tuple(sizes))
        plan = laid_out(replace(best.config, pipeline=pipeline))
        found = plan.estimate()
        if found.seconds >= best.seconds or not fits(
            found.config, found.memory.total, plan.machine
        ):
            break
        best = found
    return best


def _put(found: list[Estimate], estimate: Estimate) -> None:
    """Put an estimate where its time belongs, instead of one that is the same in words."""
    twins = [other for other in found if _in_words(other.config) == _in_words(estimate.config)]
    if any(other.seconds <= estimate.seconds for other in twins):
        return
    found[:] = [other for other in found if other not in twins]
    insort(found, estimate, key=lambda each: each.seconds)


def _in_words(config: Config) -> tuple[object, ...]:
    """Return what tells a layout from others: with one pipeline rank, not the name of its schedule.

    Of gathers by stage and by block the faster one is the layout's, as `mesh.gather = "auto"` is.
    """
    return (
        replace(config.mesh, gather="auto"),
        config.pipeline if config.mesh.pp > 1 else None,
        config.train.microbatch_size,
        config.train.recompute,
    )
