"""The layouts that a config allows: enumerated, or a covering sample of them. No torch.

A layout is a choice for each axis of `AXES`; the rules of :mod:`hp_train.rules` say which choices go
together, so that what they come to allow is found here without being told. A new axis is a line.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from msgspec.structs import replace

from hp_train import rules
from hp_train.config import Config
from hp_train.errors import ConfigError
from hp_train.schema import fields

_SIZES = (1, 2, 3, 4, 6, 8)
_LOOKED_AT = 40
"""Layouts compared for each that is taken."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One choice that a layout consists of.

    Attributes:
        key: Of the config.
        values: To choose from; none: all that the schema lists.
    """

    key: str
    values: tuple[object, ...] = ()

    @property
    def choices(self) -> tuple[object, ...]:
        """What there is to choose from."""
        return self.values or fields()[self.key].choices


AXES = (
    Axis("mesh.pp", _SIZES),
    Axis("mesh.dp_replicate", _SIZES),
    Axis("mesh.dp_shard", _SIZES),
    Axis("mesh.cp", (1, 2, 4)),
    Axis("mesh.cp_heads", (0, 1, 2)),
    Axis("mesh.tp", (1, 2, 4)),
    Axis("mesh.ep", _SIZES),
    Axis("mesh.etp", (1, 2, 4)),
    Axis("pipeline.schedule"),
    Axis("pipeline.stages_per_rank", (1, 2, 3)),
    Axis("train.microbatch_size", (1, 2, 3)),
    Axis("train.recompute"),
)

Choice = tuple[object, ...]
"""One value per axis, in the order of the axes."""


def with_keys(config: Config, values: Mapping[str, Any]) -> Config:
    """The same config with some keys replaced."""
    tables: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        tables.setdefault(section, {})[name] = value
    changed = {name: replace(getattr(config, name), **table) for name, table in tables.items()}
    return replace(config, **changed)


def is_allowed(config: Config) -> bool:
    """Whether no rule is broken."""
    try:
        rules.check(config)
    except ConfigError:
        return False
    return True


def enumerate_layouts(
    config: Config, *, num_processes: range, axes: Sequence[Axis] = AXES
) -> Iterator[tuple[Choice, Config]]:
    """Yield every layout that the rules allow, in the order of the axes' values.

    Args:
        config: Everything else comes from it.
        num_processes: How many there may be.
        axes: To vary.
    """
    keys = [axis.key for axis in axes]
    mesh = [axis for axis in axes if axis.key.startswith("mesh.")]
    rest = [axis for axis in axes if not axis.key.startswith("mesh.")]
    neutral = {axis.key: axis.choices[0] for axis in rest}
    for sizes in itertools.product(*(axis.choices for axis in mesh)):
        placed = with_keys(config, dict(zip([a.key for a in mesh], sizes, strict=True)))
        if placed.world_size not in num_processes:
            continue
        # Most meshes are refused whatever the rest is; this looks at them once.
        if not any(is_allowed(with_keys(placed, change)) for change in _each(neutral, rest)):
            continue
        for others in itertools.product(*(axis.choices for axis in rest)):
            found = with_keys(placed, dict(zip([a.key for a in rest], others, strict=True)))
            if is_allowed(found):
                values = dict(zip([a.key for a in (*mesh, *rest)], (*sizes, *others), strict=True))
                yield tuple(values[key] for key in keys), found


def _each(neutral: Mapping[str, object], axes: Sequence[Axis]) -> Iterator[dict[str, object]]:
    """The neutral values, then those that differ from them in one axis."""
    yield dict(neutral)
    for axis in axes:
        for value in axis.choices[1:]:
            yield {**neutral, axis.key: value}


@dataclass(frozen=True)
class Sample:
    """Some of the layouts of a config.

    Attributes:
        layouts: In the order of drawing: any first part of it covers as much as it can.
        num_allowed: Layouts to draw from.
        num_pairs: Pairs of values of two axes that some allowed layout has.
        num_covered: Those of them that some drawn layout has.
    """

    layouts: tuple[Config, ...]
    num_allowed: int
    num_pairs: int
    num_covered: int


def sample_layouts(
    config: Config,
    count: int,
    *,
    seed: int = 0,
    num_processes: range = range(2, 9),
    axes: Sequence[Axis] = AXES,
) -> Sample:
    """Draw layouts so that every pair of values of two axes comes up as soon as it can.

    The rarest pair so far decides: of the layouts that have it, the one with the most pairs as rare
    is taken, and among equals one of few processes. The number of processes counts as an axis. The same arguments give the same layouts, and a larger count the same ones first.

    Args:
        config: Everything else comes from it.
        count: How many; fewer if there are no more.
        seed: Of the ties.
        num_processes: How many each may have.
        axes: To vary.
    """
    pool = [
        ((*choice, found.world_size), found)
        for choice, found in enumerate_layouts(config, num_processes=num_processes, axes=axes)
    ]
    random = Random(seed)  # noqa: S311 - nothing is secret
    random.shuffle(pool)
    having: dict[tuple[int, object, int, object], list[int]] = {}
    for index, (choice, _) in enumerate(pool):
        for pair in _pairs(choice):
            having.setdefault(pair, []).append(index)
    seen = Counter(dict.fromkeys(having, 0))
    taken: dict[int, Config] = {}
    open_pairs = list(having)
    while len(taken) < min(count, len(pool)):
        rarest = min(open_pairs, key=lambda pair: seen[pair])
        left = [index for index in having[rarest] if index not in taken]
        if not left:
            open_pairs.remove(rarest)
            continue
        some = random.sample(left, min(len(left), _LOOKED_AT))
        least = seen[rarest]
        best = _best(some, pool, seen, least)
        seen.update(_pairs(pool[best][0]))
        taken[best] = pool[best][1]
    covered = sum(number > 0 for number in seen.values())
    return Sample(tuple(taken.values()), len(pool), len(having), covered)


def _best(
    indices: Sequence[int],
    pool: Sequence[tuple[Choice, Config]],
    seen: Mapping[tuple[int, object, int, object], int],
    least: int,
) -> int:
    """The layout with the most pairs that were seen no more often than that, then the smallest."""

    def key(index: int) -> tuple[int, int]:
        choice, config = pool[index]
        return sum(seen[pair] <= least for pair in _pairs(choice)), -config.world_size

    return max(indices, key=key)


def _pairs(choice: Choice) -> list[tuple[int, object, int, object]]:
    return [(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(choice), 2)]
