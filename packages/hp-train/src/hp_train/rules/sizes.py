"""Sizes that everything after these rules is made in proportion to: checked before any of it is."""

from collections.abc import Iterator

from hp_train.config import MOST_EXPERTS, MOST_LAYERS, Config
from hp_train.schedules import count_stages

_MOST_PROCESSES = 65_536
_MOST_STEPS_OF_STAGES = 1_000_000  # forwards of all stages in one step of training


def size_rules(config: Config) -> Iterator[str]:
    """Processes, layers, experts and microbatches must be as many as can be listed."""
    mesh, model, train = config.mesh, config.model, config.train
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
    sequences = train.global_batch_size // (mesh.dp_replicate * mesh.dp_shard)
    forwards = sequences // train.microbatch_size * count_stages(config)
    if forwards > _MOST_STEPS_OF_STAGES:
        yield (
            f"microbatches of train.global_batch_size ({train.global_batch_size}) in "
            f"{count_stages(config)} stages ({forwards} forwards) must be at most "
            f"{_MOST_STEPS_OF_STAGES}"
        )
