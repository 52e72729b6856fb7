"""Rules for two configs that are compared, and bounds on their errors. No torch."""

import fnmatch
from collections import defaultdict
from collections.abc import Iterable

import msgspec

from hp_base.errors import ConfigError
from hp_base.messages import shown
from hp_trainer.config import Config, to_dict
from hp_trainer.config.options import one_process, with_keys
from hp_trainer.config.schema import fields
from hp_trainer.layout.schedules import layers_of_stages, placement

WITHOUT_EFFECT = (
    "launch.* run.output_dir run.name run.resume run.tensorboard data.cache_gib train.*_every "
    "train.eval_batches train.async_save train.keep_checkpoints train.profile* "
    "train.max_skipped_steps train.not_finite train.sample_*"
)
"""Keys that have no effect on what is trained."""
EXACT = (
    "pipeline.schedule",
    "pipeline.overlap",
    "pipeline.retention",
    "pipeline.keep_microbatches",
    "train.recompute",
)
"""Keys that change when or how often something is computed, but no sum: bits must stay the same.

That is where they cut the model alike and no layer comes to ranks of another number by it, see
`sizes_by_stage`.
"""

_EXACT = " ".join(EXACT)
_LAYOUT = "mesh.* pipeline.* train.microbatch_size train.compile data.plan_* " + _EXACT
_BATCHES = "data.packing"
"""Keys of generated layouts that change what is trained: each value has one process of its own."""

BOUNDS = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2}
"""Largest relative error that counts as equal, by the dtype that is computed in."""
ORACLE = "oracle"
"""What one process is compared with, as ``--against`` has it: see `hp_train.verify.oracle`."""
SLACK = {"weight": 100.0, "saved": 100.0, "loaded": 100.0, "second moment": 4.0}
"""Factors of these bounds in less than fp64: AdamW divides tiny gradients by their own size."""
TIE = 1e-6
"""Scores of experts closer than this are a tie that rounding may break, in less than fp64."""
FIXED = (
    *("start", "separator", "first sequence", "tokens", "targets"),
    *("eval tokens", "eval targets", "learning rate"),
)
"""Quantities that follow from no choice of experts."""


def is_one_of(key: str, patterns: str) -> bool:
    """Say if a key is one of some, which may end in a star and stand with spaces between them."""
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns.split())


def differing_keys(config: Config, other: Config) -> list[str]:
    """Return keys in which two configs differ and that have an effect on the training."""
    mine, theirs = to_dict(config), to_dict(other)
    return [
        key
        for section, table in mine.items()
        for name, value in table.items()
        if theirs[section][name] != value
        and not is_one_of(key := f"{section}.{name}", WITHOUT_EFFECT)
    ]


def require_comparable(config: Config, other: Config) -> None:
    """Refuse configs that do not train the same model on the same batches.

    Raises:
        ConfigError: Names the first key.
    """
    for key in differing_keys(config, other):
        if not is_one_of(key, _LAYOUT):
            section, _, name = key.partition(".")
            mine, theirs = (shown(getattr(getattr(c, section), name)) for c in (config, other))
            raise ConfigError(f"{key} ({mine}) must equal {key} ({theirs}) of the other config")


def must_be_exact(config: Config, other: Config) -> bool:
    """Tell whether two configs may not differ in a single bit of what they compute."""
    are_alike = all(is_one_of(key, _EXACT) for key in differing_keys(config, other))
    return are_alike and sizes_by_stage(config) == sizes_by_stage(other)


def sizes_by_stage(config: Config) -> list[tuple[int, int, int]]:
    """Return layers, tensor- and expert-parallel ranks of each stage, as the schedule has them."""
    mesh = config.mesh
    places = placement(config.pipeline, num_ranks=mesh.pp)
    return [
        (len(held), mesh.tp_sizes[rank], mesh.ep_sizes[rank])
        for rank, held in zip(places, layers_of_stages(config), strict=True)
    ]


def described(config: Config, base: Config) -> str:
    """Say how a layout differs from one process, as overrides that can be pasted into a command."""
    tables = to_dict(config)
    keys = [
        key
        for key in differing_keys(config, one_process(base))
        if is_one_of(key, f"{_LAYOUT} {_BATCHES}")
    ]
    values = (tables[section][name] for section, _, name in (key.partition(".") for key in keys))
    parts = [f"{key}={value}".replace(" ", "") for key, value in zip(keys, values, strict=True)]
    return " ".join(parts) or "one process"


def families(layouts: Iterable[Config]) -> list[list[Config]]:
    """Group layouts that must be bitwise equal with each other, in the order of the first of each.

    Args:
        layouts: Layouts of one model, text and batch.
    """
    found: dict[bytes, list[Config]] = defaultdict(list)
    for layout in layouts:
        alike = with_keys(layout, {key: fields()[key].default for key in EXACT})
        found[msgspec.json.encode((alike, sizes_by_stage(layout)))].append(layout)
    return list(found.values())
