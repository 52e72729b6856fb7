"""The layouts that a config allows: all meshes, or a sample that covers pairs of values. No torch.

A layout is a choice for each axis of `AXES`; the rules of :mod:`hp_trainer.config.rules` decide
which choices go together, so that layouts of a new rule are found without a change here. A new axis
is one line.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from random import Random

from hp_trainer.config import Config, rules
from hp_trainer.config.options import with_keys
from hp_trainer.config.schema import fields

_SIZES = (1, 2, 3, 4, 6, 8)
_LOOKED_AT = 40
"""Number of layouts to compare for each one of the sample."""
_POOL_SIZE = 20_000
"""Approximate size of the pool; if there are more layouts, it has equal parts of each number of
processes, and these equal parts of each mesh."""
_TRIES = 200
"""Number of layouts to try for a pair of values that no layout of the pool has."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One choice that a layout consists of.

    Attributes:
        key: Key of the config.
        values: Possible values, first one that needs the fewest processes; empty: all values of the
            schema.
    """

    key: str
    values: tuple[object, ...] = ()

    @property
    def choices(self) -> tuple[object, ...]:
        """Return the possible values."""
        return self.values or fields()[self.key].choices


AXES = (
    Axis("mesh.pp", _SIZES),
    Axis("mesh.stage_tp", ((), (1, 2), (2, 1), (1, 2, 1))),
    Axis("mesh.stage_ep", ((), (1, 2), (2, 1))),
    Axis("mesh.dp_replicate", _SIZES),
    Axis("mesh.dp_shard", _SIZES),
    Axis("mesh.cp", (1, 2, 4)),
    Axis("mesh.cp_heads", (0, 1, 2)),
    Axis("mesh.cp_ring", (False, True)),
    Axis("mesh.cp_deal", (False, True)),
    Axis("mesh.tp", (1, 2, 4)),
    Axis("mesh.ep", _SIZES),
    Axis("mesh.etp", (1, 2, 4)),
    Axis("mesh.ep_buffer", (0.0, 1.0, 4.0)),
    Axis("mesh.gather"),
    Axis("mesh.reduce_once", (False, True)),
    Axis("pipeline.schedule"),
    Axis("pipeline.stages_per_rank", (1, 2, 3)),
    Axis("pipeline.stage_layers", ((), (3, 5), (1, 2, 3, 2))),
    Axis("pipeline.overlap", (False, True)),
    Axis("pipeline.retention"),
    Axis("pipeline.keep_microbatches", (1, 2)),
    Axis("train.microbatch_size", (1, 2, 3)),
    Axis("train.recompute"),
    Axis("data.packing"),
)

Choice = tuple[object, ...]
"""One value per axis, in the order of the axes."""
Pair = tuple[int, object, int, object]
"""Two axes, each with one of its values."""


def layouts_of_mesh(
    placed: Config, *, axes: Sequence[Axis], choices: Iterable[Choice]
) -> Iterator[tuple[Choice, Config]]:
    """Yield the layouts of a mesh from `enumerate_meshes`, each with the values of other axes.

    Args:
        placed: Config with the mesh.
        axes: Axes other than those of the mesh.
        choices: Values of these axes.
    """
    for others in choices:
        found = _chosen(placed, axes, others)
        if rules.allows_pipeline(found):
            yield others, found


def enumerate_meshes(
    config: Config, *, num_processes: range, axes: Sequence[Axis]
) -> list[tuple[Choice, Config]]:
    """Return the meshes that are allowed with first values of other axes, or one other value.

    Args:
        config: Config of everything but the layout, allowed itself.
        num_processes: Numbers of processes that a layout may have.
        axes: Axes to vary, first those of the mesh.

    Returns:
        Values of the axes of the mesh, and a config with them.
    """
    mesh = [axis for axis in axes if axis.key.startswith("mesh.")]
    rest = [axis for axis in axes if not axis.key.startswith("mesh.")]
    if list(axes) != [*mesh, *rest]:
        raise ValueError("axes of the mesh must come before the others")
    smallest = _chosen(config, axes, [axis.choices[0] for axis in axes])
    found: list[tuple[Choice, Config]] = [((), smallest)]
    for index, axis in enumerate(mesh, 1):
        found = [
            ((*sizes, value), wider)
            for sizes, placed in found
            for value, wider in _widened(placed, axis, num_processes)
        ]
        others = mesh[index:]
        if not any(_adds_processes(smallest, other) for other in others):
            near = [*_nearly_neutral(others)]
            found = [
                (sizes, placed)
                for sizes, placed in found
                if placed.world_size in num_processes
                and any(rules.allows_mesh(_chosen(placed, others, choice)) for choice in near)
            ]
    return [
        (sizes, placed)
        for sizes, placed in found
        if any(layouts_of_mesh(placed, axes=rest, choices=_nearly_neutral(rest)))
    ]


def _adds_processes(smallest: Config, axis: Axis) -> bool:
    wider = (with_keys(smallest, {axis.key: value}) for value in axis.choices)
    return any(each.world_size != smallest.world_size for each in wider)


def _widened(placed: Config, axis: Axis, num_processes: range) -> Iterator[tuple[object, Config]]:
    """Yield each value of an axis of the mesh with a config that has it; `placed` has the first."""
    first, *others = axis.choices
    yield first, placed
    for value in others:
        wider = with_keys(placed, {axis.key: value})
        # Further axes only add processes.
        if wider.world_size < num_processes.stop and rules.allows_stages(wider):
            yield value, wider


def _chosen(config: Config, axes: Sequence[Axis], choice: Sequence[object]) -> Config:
    return with_keys(config, {axis.key: v for axis, v in zip(axes, choice, strict=True)})


def _nearly_neutral(axes: Sequence[Axis]) -> Iterator[Choice]:
    """Yield the first value of every axis, then choices that differ from that in one axis."""
    neutral = tuple(axis.choices[0] for axis in axes)
    yield neutral
    for index, axis in enumerate(axes):
        for value in axis.choices[1:]:
            yield (*neutral[:index], value, *neutral[index + 1 :])


@dataclass(frozen=True)
class Sample:
    """Some of the layouts of a config.

    Attributes:
        layouts: Layouts in the order of drawing; any first part of them covers as much as it can.
        num_meshes: Number of different meshes that are allowed.
        num_pairs: Number of pairs of values of two axes in allowed layouts.
        num_covered: Number of these pairs in drawn layouts.
    """

    layouts: tuple[Config, ...]
    num_meshes: int
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
    """Draw layouts so that every pair of values of two axes appears as early as possible.

    Each draw has the rarest pair so far, and of the layouts with it, most other pairs as rare, then
    fewest processes. The number of processes counts as an axis. The same arguments give the same
    layouts, and a larger count the same ones first.

    Args:
        config: Config of everything but the layout, allowed itself.
        count: Number of layouts; fewer if there are no more.
        seed: Seed of the choice between ties, and of the pool if there are very many layouts.
        num_processes: Numbers of processes that a layout may have.
        axes: Axes to vary, first those of the mesh.
    """
    random = Random(seed)  # noqa: S311 - nothing is secret
    meshes = enumerate_meshes(config, num_processes=num_processes, axes=axes)
    pool = _pool(meshes, [axis for axis in axes if not axis.key.startswith("mesh.")], random)
    having = _having(pool)
    seen = Counter(dict.fromkeys(having, 0))
    taken: dict[int, Config] = {}
    open_pairs = list(having)
    while len(taken) < min(count, len(pool)):
        rarest = min(open_pairs, key=lambda pair: seen[pair])
        bits = reversed(f"{having[rarest]:b}")
        left = [index for index, bit in enumerate(bits) if bit == "1" and index not in taken]
        if not left:
            open_pairs.remove(rarest)
            continue
        some = random.sample(left, min(len(left), _LOOKED_AT))
        best = _best(some, pool, seen, seen[rarest])
        seen.update(_pairs(pool[best][0]))
        taken[best] = pool[best][1]
    covered = sum(number > 0 for number in seen.values())
    return Sample(tuple(taken.values()), len(meshes), len(having), covered)


def _pool(
    meshes: Sequence[tuple[Choice, Config]], rest: Sequence[Axis], random: Random
) -> list[tuple[Choice, Config]]:
    """Return layouts of every mesh: all of them, or equal parts of each for a small pool."""
    everything = list(itertools.product(*(axis.choices for axis in rest)))
    sizes = Counter(placed.world_size for _, placed in meshes)
    are_all = len(meshes) * len(everything) <= _POOL_SIZE
    pool = []
    for choice, placed in meshes:
        size = placed.world_size
        wanted = max(1, _POOL_SIZE // len(sizes) // sizes[size])
        others = everything if are_all else _few(everything, rest, wanted, random)
        allowed = layouts_of_mesh(placed, axes=rest, choices=others)
        for other, found in allowed if are_all else itertools.islice(allowed, wanted):
            pool.append(((*choice, *other, size), found))
    if not are_all:
        pool += _missing(pool, meshes, rest, random)
    random.shuffle(pool)
    return pool


def _missing(
    pool: Sequence[tuple[Choice, Config]],
    meshes: Sequence[tuple[Choice, Config]],
    rest: Sequence[Axis],
    random: Random,
) -> Iterator[tuple[Choice, Config]]:
    """Yield layouts with pairs of values that no layout of a pool has, of its meshes."""
    placed, num_sizes = dict(meshes), len(meshes[0][0])
    choices = [choice[:-1] for choice, _ in pool]
    columns = list(zip(*choices, strict=True))
    having: dict[tuple[int, object], list[Choice]] = {}
    for choice in choices:
        for value in enumerate(choice):
            having.setdefault(value, []).append(choice)
    at = [(i, j) for i, j in itertools.combinations(range(len(columns)), 2) if j >= num_sizes]
    seen = {(i, j): set(zip(columns[i], columns[j], strict=True)) for i, j in at}

    in_order = sorted(having, key=itemgetter(0))
    for (i, a), (j, b) in itertools.combinations(in_order, 2):
        if (i, j) not in seen or (a, b) in seen[i, j]:
            continue
        layouts = (
            ((*choice, found.world_size), found)
            for choice in _crossed(having, (i, a), (j, b), num_sizes, random)
            for _, found in layouts_of_mesh(
                placed[choice[:num_sizes]], axes=rest, choices=[choice[num_sizes:]]
            )
        )
        for choice, layout in itertools.islice(layouts, 1):
            for one, other in at:
                seen[one, other].add((choice[one], choice[other]))
            yield choice, layout


def _crossed(
    having: Mapping[tuple[int, object], Sequence[Choice]],
    one: tuple[int, object],
    other: tuple[int, object],
    num_sizes: int,
    random: Random,
) -> Iterator[Choice]:
    """Yield choices with two given values, each combined of two choices with one of them.

    A choice has the mesh of one and the rest of the other, or all of one but the value of the
    other, so that a value mostly keeps the values that it needs.
    """
    (i, a), (j, b) = one, other
    for _ in range(_TRIES):
        first, second = random.choice(having[one]), random.choice(having[other])
        if i < num_sizes:
            yield (*first[:num_sizes], *second[num_sizes:])
        elif random.random() < 0.5:
            yield (*first[:j], b, *first[j + 1 :])
        else:
            yield (*second[:i], a, *second[i + 1 :])


def _having(pool: Sequence[tuple[Choice, Config]]) -> dict[Pair, int]:
    """Return the pairs of values in a pool, each with a bit per layout that has the pair."""
    columns = enumerate(zip(*(choice for choice, _ in reversed(pool)), strict=True))
    having = {
        (axis, value): int("".join("1" if other == value else "0" for other in column), 2)
        for axis, column in columns
        for value in dict.fromkeys(column)
    }
    found = {
        (i, a, j, b): both
        for (i, a), (j, b) in itertools.combinations(having, 2)
        if i < j and (both := having[i, a] & having[j, b])
    }
    return dict(sorted(found.items(), key=lambda pair: (pair[1] & -pair[1], pair[0][::2])))


def _few(
    everything: Sequence[Choice], rest: Sequence[Axis], wanted: int, random: Random
) -> Iterator[Choice]:
    """Draw choices, of which half differ from the first values in at most one axis."""
    near = list(_nearly_neutral(rest))
    random.shuffle(near)
    some = random.sample(everything, min(len(everything), len(near) + wanted))
    turns = itertools.chain.from_iterable(itertools.zip_longest(some, near))
    yield from dict.fromkeys(choice for choice in turns if choice is not None)


def _best(
    indices: Sequence[int],
    pool: Sequence[tuple[Choice, Config]],
    seen: Mapping[Pair, int],
    least: int,
) -> int:
    """Return the layout with most pairs seen at most `least` times, then the smallest."""

    def key(index: int) -> tuple[int, int]:
        choice, config = pool[index]
        return sum(seen[pair] <= least for pair in _pairs(choice)), -config.world_size

    return max(indices, key=key)


def _pairs(choice: Choice) -> list[Pair]:
    return [(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(choice), 2)]
