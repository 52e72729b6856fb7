"""The best layout as the file of a config, and as the command that trains with it. No torch."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from hp_base.errors import ConfigError
from hp_plan.layouts.report import name
from hp_plan.price.estimate import Estimate
from hp_trainer.config import Config, to_dict
from hp_trainer.config.options import Resolved, to_toml
from hp_trainer.config.schema import fields


def require_other_file(path: str, source: str | None) -> None:
    """Refuse a file that no command would take for a config, and the planned config itself.

    Args:
        path: Value of the flag `--write`.
        source: Config of the command line; None: none.

    Raises:
        ConfigError: About such a file.
    """
    if Path(path).suffix != ".toml":
        raise ConfigError(f'--write ("{path}") must end with .toml, as configs do')
    if source is not None and Path(source).resolve() == Path(path).resolve():
        raise ConfigError(f'--write ("{path}") must be another file than the config')


def as_toml(resolved: Resolved, best: Estimate) -> str:
    """Return the config with a layout, each value with its origin."""
    changed = _changed(resolved.config, best.config)
    origins = dict(resolved.origins) | dict.fromkeys(changed, "hp plan")
    return f"# By hp plan: {name(best)}.\n\n{to_toml(best.config, origins)}"


def as_flags(
    resolved: Resolved, best: Estimate, *, source: str | None, given: Mapping[str, object]
) -> list[str]:
    """Return the arguments of `hp train` for a layout.

    Args:
        resolved: The config that was planned.
        best: Estimate of the layout.
        source: Config of the command line; None: none.
        given: Other keys of the command line, with their values.
    """
    words = [] if source is None else [source]
    for key, value in {**given, **_changed(resolved.config, best.config)}.items():
        words += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
    return words


def start_command(words: Sequence[str], best: Estimate, *, node_size: int) -> str:
    """Return the command that trains with a layout, to be given on each node if there are several.

    Args:
        words: Arguments of `hp train`.
        best: Estimate of the layout.
        node_size: Number of devices of a node.
    """
    number, run = best.config.world_size, best.config.run.name
    local = next(n for n in range(min(number, node_size), 0, -1) if number % n == 0)
    if local == number:
        return shlex.join(["hp", "train", *words])
    nodes = ["--nnodes", str(number // local), "--nproc-per-node", str(local)]
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "FIRST_NODE:29400", "--rdzv-id", "NAME"]
    named = [] if run else ["--run.name", "NAME"]
    return shlex.join(["torchrun", *nodes, *meet, "-m", "hp_train", "train", *words, *named])


def _changed(before: Config, after: Config) -> dict[str, object]:
    """Return the keys that have another value in a layout, with that value."""
    old, new = to_dict(before), to_dict(after)
    return {
        key: new[field.section][field.name]
        for key, field in fields().items()
        if old[field.section][field.name] != new[field.section][field.name]
    }
