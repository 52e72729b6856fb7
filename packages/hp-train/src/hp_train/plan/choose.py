"""Compare all layouts of a number of devices and say why the best is best. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from hp_schedule import Schedule
from hp_train.config import Config
from hp_train.errors import ConfigError
from hp_train.layout import Layout
from hp_train.plan.estimate import Estimate, Plan
from hp_train.plan.machine import Machine
from hp_train.schedules import KINDS
from hp_train.space import Axis, enumerate_layouts

_MESH = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")
_MOST_SIMULATED = 400


@dataclass(frozen=True, slots=True)
class Choice:
    """Layouts of a number of devices, compared.

    Attributes:
        best: Those that fit into memory, the fastest first.
        too_large: Of those that do not fit, the one that lacks least; None if all looked at fit.
        num_allowed: Layouts that the rules allow.
        num_simulated: Those whose schedules were laid out; the others cannot be among the best.
    """

    best: tuple[Estimate, ...]
    too_large: Estimate | None
    num_allowed: int
    num_simulated: int


def plan_axes(config: Config, num_devices: int) -> tuple[Axis, ...]:
    """What layouts are made of: every divisor of the number of devices for every mesh axis."""
    divisors = tuple(n for n in range(1, num_devices + 1) if num_devices % n == 0)
    mesh = tuple(Axis(f"mesh.{axis}", divisors) for axis in _MESH)
    batch = config.train.global_batch_size
    sizes = tuple(size for size in (1, 2, 4, 8, 16) if size <= batch)
    return (
        *mesh,
        Axis("pipeline.schedule"),
        Axis("pipeline.stages_per_rank", (1, 2, 3, 4)),
        Axis("train.microbatch_size", tuple(sorted({*sizes, config.train.microbatch_size}))),
        Axis("train.recompute", tuple(dict.fromkeys(("none", "full", config.train.recompute)))),
    )


def choose(
    config: Config, num_devices: int, machine: Machine, *, vocab_size: int, count: int = 5
) -> Choice:
    """Find the fastest layouts that fit into memory, of those whose stages have the same sizes.

    Layouts are laid out in the order of a bound that none of them can undercut, until the next
    bound is above what was found; so none that was left out can be better.

    Args:
        config: Everything but the layout and the microbatch size comes from it.
        num_devices: To use, all of them.
        machine: What they do.
        vocab_size: Of the tokenizer.
        count: How many to find.

    Raises:
        ConfigError: When no layout is allowed, or none fits.
    """
    config = replace(
        config,
        launch=replace(config.launch, num_processes=0),
        mesh=replace(config.mesh, stage_tp=(), stage_ep=()),
    )
    axes = plan_axes(config, num_devices)
    processes = range(num_devices, num_devices + 1)
    allowed = [
        layout
        for _, layout in enumerate_layouts(config, num_processes=processes, axes=axes)
        if not _is_repeated(layout)
    ]
    if not allowed:
        raise ConfigError(f"no layout of {num_devices} processes is allowed for this config")
    bounds = sorted(_bounds(allowed, machine, vocab_size), key=lambda bound: bound[0])
    found: list[Estimate] = []
    large: list[Estimate] = []
    simulated = 0
    for least, plan in bounds:
        done = len(found) >= count and found[count - 1].seconds <= least
        if done or simulated == _MOST_SIMULATED:
            break
        simulated += 1
        estimate = plan.estimate()
        if estimate.memory.total <= machine.memory:
            _put(found, estimate)
        else:
            large.append(estimate)
    nearest = min(large, key=lambda estimate: estimate.memory.total, default=None)
    if not found:
        assert nearest is not None
        raise ConfigError(
            f"no layout of {num_devices} processes fits: {nearest.memory.total / 1e9:.1f} GB "
            f"must be at most the memory of a device ({machine.memory / 1e9:.1f} GB)"
        )
    return Choice(tuple(found[:count]), nearest, len(allowed), simulated)


def _put(found: list[Estimate], estimate: Estimate) -> None:
    """Put an estimate where its time belongs, instead of one that is the same in words."""
    twins = [other for other in found if _in_words(other.config) == _in_words(estimate.config)]
    if any(other.seconds <= estimate.seconds for other in twins):
        return
    found[:] = [other for other in found if other not in twins]
    found.append(estimate)
    found.sort(key=lambda estimate: estimate.seconds)


def _in_words(config: Config) -> tuple[object, ...]:
    """What tells a layout from others: with one pipeline rank, not the name of its schedule."""
    pipeline = config.pipeline if config.mesh.pp > 1 else None
    return config.mesh, pipeline, config.train.microbatch_size, config.train.recompute


def _bounds(
    layouts: Sequence[Config], machine: Machine, vocab_size: int
) -> Iterator[tuple[float, Plan]]:
    schedules: dict[object, Schedule] = {}
    for layout in layouts:
        plan = Plan(layout, machine, vocab_size=vocab_size)
        pipeline = layout.pipeline
        # Where stages are does not depend on the number of microbatches.
        key = (pipeline.schedule, plan.layout.pp, pipeline.stages_per_rank)
        if key not in schedules:
            schedules[key] = KINDS[pipeline.schedule].build(
                plan.layout.pp, 1, pipeline.stages_per_rank
            )
        yield plan.least_seconds(schedules[key]), plan


def _is_repeated(config: Config) -> bool:
    """Whether another layout runs the very same steps in the very same order."""
    mesh, pipeline = config.mesh, config.pipeline
    if mesh.ep * mesh.etp > 1 and not config.model.has_experts:
        return True
    if mesh.pp > 1:
        names = ("interleaved_1f1b", "looped_bfs")
        return pipeline.stages_per_rank == 1 and pipeline.schedule in names
    # One rank waits for nobody; but the order decides how often it gathers parameters.
    stage = Layout.of(mesh).stages[0]
    is_sharded = stage.fsdp > 1 or stage.expert_shard > 1
    return not is_sharded and pipeline.schedule != "1f1b"
