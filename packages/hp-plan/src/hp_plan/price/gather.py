"""The choice of FSDP's gathers for `mesh.gather = "auto"`: by stage or by block. No torch.

By stage sends least and needs most memory; by block overlaps gathers with compute, but gathers for
every microbatch. If one of them fits into the memory of a device, it is chosen; if both fit, the
one with the shorter step. The estimates of `hp plan` decide, also for the trainer and dry runs.
"""

from hp_plan.costs import modules
from hp_plan.costs.machine import Machine
from hp_plan.costs.memory import Memory, padding
from hp_plan.price.estimate import Estimate, Plan
from hp_plan.price.prices import Prices
from hp_plan.price.traffic import Spread
from hp_schedule import Costs, simulate
from hp_trainer.config import Config, rules
from hp_trainer.config.options import with_keys
from hp_trainer.layout.ranks import Layout
from hp_trainer.layout.schedules import KINDS, count_microbatches, count_stages

ROOM = 0.05
"""Share of a device that stays free: dry runs by stage reserved up to 4 % more than estimated."""


def estimate(
    config: Config, machine: Machine, *, vocab_size: int, spread: Spread | None = None
) -> Estimate:
    """Return the estimate of a layout on a machine.

    Args:
        config: Configuration of the layout; checked.
        machine: Machine with as many devices.
        vocab_size: Tokens of the vocabulary, the rows of the embedding.
        spread: See `Plan`.
    """
    return planned(config, machine, vocab_size=vocab_size, spread=spread).estimate()


def planned(
    config: Config, machine: Machine, *, vocab_size: int, spread: Spread | None = None
) -> Plan:
    """Return the plan of a layout, with "stage" or "block" in place of "auto"."""
    config = decided(config, machine, vocab_size=vocab_size, spread=spread)
    return Plan(config, machine, vocab_size=vocab_size, spread=spread)


def decided(
    config: Config, machine: Machine, *, vocab_size: int, spread: Spread | None = None
) -> Config:
    """Return the config with "stage" or "block" in place of "auto", the same on every rank.

    Args:
        config: Checked config.
        machine: Machine with the memory of the smallest device of the run.
        vocab_size: Tokens of the vocabulary, the rows of the embedding.
        spread: See `Plan`.
    """
    if config.mesh.gather != "auto":
        return config
    by_stage, by_block = (with_keys(config, {"mesh.gather": each}) for each in ("stage", "block"))
    if not (rules.allows_mesh(by_block) and rules.allows_pipeline(by_block)):
        return by_stage
    fit_stage, fit_block = (
        fits(each, most_memory(each, machine, vocab_size=vocab_size).total, machine)
        for each in (by_stage, by_block)
    )
    if not (fit_stage and fit_block):
        return by_stage if fit_stage else by_block
    stage_seconds, block_seconds = (
        Plan(each, machine, vocab_size=vocab_size, spread=spread).estimate().seconds
        for each in (by_stage, by_block)
    )
    return by_stage if stage_seconds <= block_seconds else by_block


def fits(config: Config, needed: float, machine: Machine) -> bool:
    """Tell whether the estimated bytes of the fullest rank fit into a device."""
    return needed <= room(config, machine)


def room(config: Config, machine: Machine) -> float:
    """Return the bytes of a device that a layout may use.

    Args:
        config: Config with `mesh.gather` decided.
        machine: Machine with the memory of the smallest device.
    """
    by_stage = config.mesh.gather == "stage" and _is_sharded(config)
    return (1 - ROOM * by_stage) * machine.memory


def _is_sharded(config: Config) -> bool:
    return any(stage.is_sharded for stage in Layout.of(config.mesh).stages)


def most_memory(config: Config, machine: Machine, *, vocab_size: int) -> Memory:
    """Return the memory of the fullest rank.

    Args:
        config: Checked config with `mesh.gather` decided.
        machine: Machine with the margins of devices.
        vocab_size: Tokens of the vocabulary, the rows of the embedding.
    """
    mesh, pipeline = Layout.of(config.mesh), config.pipeline
    works = modules.stages(config, vocab_size, num_stages=count_stages(config))
    # Many microbatches have no more activations at once than few.
    few = min(count_microbatches(config), 2 * mesh.pp)
    schedule = KINDS[pipeline.schedule].build(mesh.pp, few, pipeline.stages_per_rank)
    tokens = config.train.microbatch_size * config.data.seq_len // config.mesh.cp
    places = [mesh.stages[rank] for rank in schedule.stage_to_rank]
    kept = [
        work.kept_bytes(tokens, tp=place.tp, padded=padding(config, place))
        for work, place in zip(works, places, strict=True)
    ]
    peaks = simulate(schedule, Costs(activation=kept)).peak_activations
    prices = Prices(machine, vocab_size, Spread())
    return max(
        (
            prices.memory(
                config,
                tuple(works[stage] for stage in schedule.stages_of(rank)),
                place,
                rank=place.first,
                activations=peak,
            )
            for rank, (place, peak) in enumerate(zip(mesh.stages, peaks, strict=True))
        ),
        key=lambda memory: memory.total,
    )
