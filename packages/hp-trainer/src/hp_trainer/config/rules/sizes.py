"""Sizes that everything after these rules is made in proportion to: checked before any of it is."""

from collections.abc import Iterator

from hp_trainer.config import MOST_EXPERTS, MOST_LAYERS, Config
from hp_trainer.layout.schedules import count_stages

_MOST_PROCESSES = 65_536
_MOST_PROFILED = (
    16  # of steps and of ranks: a trace of a large model has 100 MB before it is packed
)
_MOST_STEPS_OF_STAGES = 1_000_000  # forwards of all stages in one step of training


def size_rules(config: Config) -> Iterator[str]:
    """Processes, layers, experts and microbatches must be as many as can be listed."""
    model, train = config.model, config.train
    if config.world_size > _MOST_PROCESSES:
        yield f"processes of the mesh ({config.world_size}) must be at most {_MOST_PROCESSES}"
    layers = model.num_layers + model.num_mtp_modules
    if layers > MOST_LAYERS:
        yield (
            f"model.num_layers ({model.num_layers}) + model.num_mtp_modules "
            f"({model.num_mtp_modules}) must be at most {MOST_LAYERS}"
        )
    elif layers * model.num_experts > MOST_EXPERTS:
        yield (
            f"model.num_experts ({model.num_experts}) x {layers} layers must be at most "
            f"{MOST_EXPERTS}"
        )
    forwards = train.global_batch_size // config.batch_unit * count_stages(config)
    if forwards > _MOST_STEPS_OF_STAGES:
        yield (
            f"microbatches of train.global_batch_size ({train.global_batch_size}) in "
            f"{count_stages(config)} stages ({forwards} forwards) must be at most "
            f"{_MOST_STEPS_OF_STAGES}"
        )
    yield from _profile_rules(config)


def _profile_rules(config: Config) -> Iterator[str]:
    """Yield what profiles take is bounded."""
    train = config.train
    for key, values in (("profile", train.profile), ("profile_ranks", train.profile_ranks)):
        if len(values) > _MOST_PROFILED:
            yield f"train.{key} ({len(values)} of them) must be at most {_MOST_PROFILED}"
    last = max(train.profile_ranks, default=0)
    if train.profile and last >= config.world_size:
        size = config.world_size
        yield f"train.profile_ranks ({last}) must be below the processes of the mesh ({size})"
