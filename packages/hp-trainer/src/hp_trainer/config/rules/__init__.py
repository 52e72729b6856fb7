"""Rules that tie several keys together, and keys to the file system. All of them are here.

Each rule is a function that yields the sentence about every way in which it is broken:
``key (value) must relation key (value)``, then the nearest values that would do.
"""

from collections.abc import Iterator

from hp_base.environment import World
from hp_base.errors import ConfigError
from hp_trainer.config import Config
from hp_trainer.config.rules.files import (
    TOKENIZER,
    extra_rules,
    file_rules,
    has_tokens,
    require_model_folder,
    require_run_directory,
    saving_rules,
)
from hp_trainer.config.rules.mesh import mesh_rules, size_rules, stage_list_rules
from hp_trainer.config.rules.model import model_rules, part_rules
from hp_trainer.config.rules.pipeline import (
    batch_rules,
    gather_rules,
    overlap_rules,
    pipeline_rules,
    planned_rules,
    recompute_rules,
    retention_rules,
)

__all__ = [
    "TOKENIZER",
    "allows_batch",
    "allows_mesh",
    "allows_pipeline",
    "allows_stages",
    "broken",
    "check",
    "has_tokens",
    "part_rules",
    "problems",
    "require_model_folder",
    "require_run_directory",
]


def check(config: Config, world: World | None = None) -> None:
    """Refuse a config that breaks a rule.

    Args:
        config: Config whose single values are all in their bounds.
        world: The processes that torchrun or Slurm started; None where neither did.

    Raises:
        ConfigError: About the first broken rule.
    """
    for problem in broken(config, world):
        raise ConfigError(problem)


def broken(config: Config, world: World | None = None) -> Iterator[str]:
    """Find the rules that a config breaks, one by one as they are asked for.

    A rule may take for granted that those before it hold: the first one is always right, and what
    comes after it may raise. Arguments are those of `check`.
    """
    yield from problems(config, world)
    yield from saving_rules(config)
    yield from file_rules(config)
    yield from extra_rules(config)


def problems(config: Config, world: World | None = None) -> Iterator[str]:
    """Find the broken rules, but for those about files; see `broken`."""
    yield from size_rules(config)
    yield from _mesh_problems(config, world)
    yield from _pipeline_problems(config)
    yield from model_rules(config)


def allows_mesh(config: Config) -> bool:
    """Tell whether the mesh of a config goes with its model, whatever pipeline and batch are.

    What has nothing to do with layouts, files above all, is not looked at, here and in
    `allows_pipeline`: they are for trying many.
    """
    return next(_mesh_problems(config, None), None) is None


def allows_pipeline(config: Config) -> bool:
    """Tell whether pipeline and batch go with mesh and model, which go together.

    A rule with a key outside of mesh and model is one of these, as layouts are tried mesh by mesh.
    """
    return next(_pipeline_problems(config), None) is None


def allows_batch(config: Config) -> bool:
    """Tell whether the batch comes in whole microbatches on all ranks."""
    return next(batch_rules(config), None) is None


def allows_stages(config: Config) -> bool:
    """Tell whether sizes of single stages go with those of the mesh that all have in common."""
    return next(stage_list_rules(config.mesh), None) is None


def _mesh_problems(config: Config, world: World | None) -> Iterator[str]:
    yield from stage_list_rules(config.mesh)
    yield from mesh_rules(config, world)


def _pipeline_problems(config: Config) -> Iterator[str]:
    yield from pipeline_rules(config)
    yield from planned_rules(config)
    yield from overlap_rules(config)
    yield from gather_rules(config)
    yield from recompute_rules(config)
    yield from batch_rules(config)
    # It lays a schedule out, which the others must allow.
    yield from retention_rules(config)
