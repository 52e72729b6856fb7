"""Compare all layouts of a number of devices and say why the best is best. No torch."""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from hp_base.errors import ConfigError
from hp_base.messages import size
from hp_plan.costs import modules
from hp_plan.costs.machine import Machine
from hp_plan.layouts.branch_and_bound import BranchAndBound
from hp_plan.layouts.space import Axis, enumerate_meshes
from hp_plan.price.estimate import Estimate, Plan, fits, room
from hp_plan.price.prices import Prices
from hp_plan.price.traffic import Spread
from hp_trainer.config import Config
from hp_trainer.layout.schedules import layers_of_stages

_MESH = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")


@dataclass(frozen=True, slots=True)
class Choice:
    """Layouts of a number of devices, compared.

    Attributes:
        best: Fastest layouts that fit into memory, the fastest first.
        too_large: Layout that lacks least memory of those that do not fit; None: all that were
            looked at fit.
        num_meshes: Number of meshes that the rules allow.
        num_priced: Number of layouts whose stages were priced.
        num_simulated: Number of layouts whose schedules were simulated.
        is_complete: Whether the best are proven to be the best; if not, the search ended early.
    """

    best: tuple[Estimate, ...]
    too_large: Estimate | None
    num_meshes: int
    num_priced: int
    num_simulated: int
    is_complete: bool


def plan_axes(config: Config, num_devices: int) -> tuple[Axis, ...]:
    """Return the axes of layouts; mesh axes take every divisor of the number of devices."""
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
    """Tell whether a number of ranks can share a model of transformers, by making its stages."""
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
    """Return the values of `train.recompute`, without those that the rules refuse in any layout."""
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

    Layouts keep the activations of all microbatches under way: another mesh or recomputation has
    always been faster than to give some up.

    The search is a best-first branch and bound: it ends when the least lower bound that is left is
    above the slowest layout to return, or when `most` layouts are simulated. In the first case no
    other layout can be faster.

    Args:
        config: Config of the run, all of it but the layout and the microbatch size.
        num_devices: Number of devices; all of them are used.
        machine: Rates of the devices.
        vocab_size: Tokens of the vocabulary, the rows of the embedding.
        count: Number of layouts to find.
        most: Maximum number of layouts to simulate.
        spread: Spread of a token's experts over ranks; see `Plan`.

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
    search = BranchAndBound(axes, Prices(machine, vocab_size, spread or Spread()), most=most)

    plan_of = partial(Plan, machine=machine, vocab_size=vocab_size, prices=search.prices)
    found: list[Estimate] = []
    large: list[Estimate] = []
    for least, layout in search.by_time(meshes):
        if len(found) >= count and found[count - 1].seconds <= least:
            break
        estimate = plan_of(layout).estimate()
        if fits(layout, estimate.memory.total, machine):
            _put(found, estimate)
        else:
            large.append(estimate)
    if not large and (smallest := search.nearest()) is not None:
        large.append(plan_of(smallest).estimate())
    nearest = min(large, key=lambda estimate: estimate.memory.total, default=None)
    if not found:
        assert nearest is not None
        raise ConfigError(
            f"no layout of {num_devices} processes fits: {size(nearest.memory.total)} must be at "
            f"most the memory of a device ({size(room(nearest.config, machine))})"
        )
    best = [_evened(estimate, plan_of) for estimate in found[:count]]
    return Choice(
        best=tuple(sorted(best, key=lambda estimate: estimate.seconds)),
        too_large=nearest,
        num_meshes=len(meshes),
        num_priced=search.num_priced,
        num_simulated=search.num_simulated,
        is_complete=search.is_complete,
    )


def _evened(best: Estimate, plan_of: Callable[[Config], Plan]) -> Estimate:
    """Move layers one by one from the stage that takes longest to the one that takes least.

    The last stage also has the output matrix and the loss, the first the embedding.
    """
    sizes, plan = [len(layers) for layers in layers_of_stages(best.config)], plan_of(best.config)
    while plan.layout.pp > 1 and max(sizes) > 1:
        took = [price.forward + price.input_grad + price.weight_grad for price in plan.prices]
        most = max(range(len(sizes)), key=lambda stage: (sizes[stage] > 1, took[stage]))
        sizes[most] -= 1
        sizes[took.index(min(took))] += 1
        pipeline = replace(best.config.pipeline, stage_layers=tuple(sizes))
        plan = plan_of(replace(best.config, pipeline=pipeline))
        found = plan.estimate()
        if found.seconds >= best.seconds or not fits(
            found.config, found.memory.total, plan.machine
        ):
            break
        best = found
    return best


def _put(found: list[Estimate], estimate: Estimate) -> None:
    """Insert an estimate by its time; of two of the same layout the faster stays."""
    twins = [other for other in found if _identity(other.config) == _identity(estimate.config)]
    if any(other.seconds <= estimate.seconds for other in twins):
        return
    found[:] = [other for other in found if other not in twins]
    insort(found, estimate, key=lambda each: each.seconds)


def _identity(config: Config) -> tuple[object, ...]:
    """Return the keys by which layouts differ; with one pipeline rank, not the schedule's name.

    Whether FSDP gathers by stage or block is left out, since `mesh.gather = "auto"` chooses.
    """
    return (
        replace(config.mesh, gather="auto"),
        config.pipeline if config.mesh.pp > 1 else None,
        config.train.microbatch_size,
        config.train.recompute,
    )
