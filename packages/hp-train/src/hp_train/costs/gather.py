"""How FSDP gathers where the config leaves it open (`mesh.gather = "auto"`). No torch.

By stage sends least, so it is by stage where that fits into the memory of a device, by what
`hp plan` counts, and by block where it does not.
"""

from hp_schedule import Costs, simulate
from hp_train.config import Config, rules
from hp_train.config.space import with_keys
from hp_train.costs import modules
from hp_train.costs.machine import Machine
from hp_train.costs.memory import Memory, rank_memory
from hp_train.layout.ranks import Layout
from hp_train.layout.schedules import KINDS, count_microbatches, count_stages

ROOM = 0.05
"""Share of a device that is left: dry runs by stage reserved up to 4 % more than is counted."""


def decided(config: Config, machine: Machine, *, vocab_size: int) -> Config:
    """The config with "stage" or "block" in the place of "auto"; every rank finds the same.

    Args:
        config: Checked.
        machine: Its memory is that of the smallest device of the run.
        vocab_size: Tokens of the vocabulary, the rows of the embedding.
    """
    if config.mesh.gather != "auto":
        return config
    by_stage, by_block = (with_keys(config, {"mesh.gather": each}) for each in ("stage", "block"))
    if not (rules.allows_mesh(by_block) and rules.allows_pipeline(by_block)):
        return by_stage
    needed = most_memory(by_stage, machine, vocab_size=vocab_size).total
    fits = needed <= (1 - ROOM) * machine.memory
    return by_stage if fits else by_block


def in_words(config: Config) -> str:
    """How parameters are gathered, as a clause behind a layout; nothing where none are."""
    if not any(stage.is_sharded for stage in Layout.of(config.mesh).stages):
        return ""
    return f", gathered by {'block' if config.mesh.gather == 'block' else 'stage'}"


def most_memory(config: Config, machine: Machine, *, vocab_size: int) -> Memory:
    """What the rank needs that needs most.

    Args:
        config: Checked, and decided.
        machine: What devices hold besides tensors.
        vocab_size: Tokens of the vocabulary, the rows of the embedding.
    """
    mesh, pipeline = Layout.of(config.mesh), config.pipeline
    works = modules.stages(config, vocab_size, num_stages=count_stages(config))
    # No more is under way with many microbatches than with few.
    few = min(count_microbatches(config), 2 * mesh.pp)
    schedule = KINDS[pipeline.schedule].build(mesh.pp, few, pipeline.stages_per_rank)
    tokens = config.train.microbatch_size * config.data.seq_len // config.mesh.cp
    kept = [
        work.kept_bytes(tokens, tp=mesh.stages[rank].tp)
        for work, rank in zip(works, schedule.stage_to_rank, strict=True)
    ]
    peaks = simulate(schedule, Costs(activation=kept)).peak_activations
    return max(
        (
            rank_memory(
                config,
                [works[stage] for stage in schedule.stages_of(rank)],
                mesh.stages[rank],
                machine,
                peak,
            )
            for rank, peak in enumerate(peaks)
        ),
        key=lambda memory: memory.total,
    )
