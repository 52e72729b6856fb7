"""Layouts read from plain dictionaries and checked: every problem as one line."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeGuard

from hp_vtp.topology.stages import Placement, Replicated, Sharded, StageLayout


class LayoutError(ValueError):
    """A layout that cannot work.

    Attributes:
        problems: Problems of the layout, one line each.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        """Store the problems; at least one."""
        self.problems = tuple(problems)
        lines = "".join(f"\n- {problem}" for problem in self.problems)
        super().__init__(f"bad layout, {len(self.problems)} problem(s):{lines}")


def layout_problems(
    stages: tuple[StageLayout, ...], chain: tuple[int, ...], world_size: int
) -> list[str]:
    """Describe every problem of a layout; empty when it can work."""
    if not stages:
        return ["stages must not be empty"]
    of_stages = (
        f"stage {index}: {problem}"
        for index, stage in enumerate(stages)
        for problem in _stage_problems(stage)
    )
    return [
        *of_stages,
        *_replica_count_problems(stages),
        *_rank_problems(stages, world_size),
        *_chain_problems(stages, chain),
    ]


def _stage_problems(stage: StageLayout) -> Iterator[str]:
    if not stage.replicas or not all(stage.replicas):
        yield "every replica must have at least one rank, and there must be at least one"
        return
    sizes = [len(part) for part in stage.replicas]
    if len(set(sizes)) > 1:
        yield f"replicas must have one size ({sizes})"
    if stage.lanes is not None and not 1 <= stage.lanes <= min(sizes):
        yield f"lanes ({stage.lanes}) must be within 1..tp_size ({min(sizes)})"
    if isinstance(stage.boundary, Sharded) and stage.boundary.dim < 0:
        yield f"boundary dim ({stage.boundary.dim}) must be at least 0"


def _replica_count_problems(stages: Sequence[StageLayout]) -> Iterator[str]:
    counts = [len(stage.replicas) for stage in stages]
    domains = max(counts)
    for index, count in enumerate(counts):
        if count and domains % count:
            yield (
                f"stage {index}: number of replicas ({count}) must divide the largest "
                f"number of replicas ({domains})"
            )


def _rank_problems(stages: Sequence[StageLayout], world_size: int) -> Iterator[str]:
    uses = Counter(
        (rank, index)
        for index, stage in enumerate(stages)
        for part in stage.replicas
        for rank in part
    )
    stages_by_rank: dict[int, list[int]] = {}
    for (rank, index), count in uses.items():
        stages_by_rank.setdefault(rank, []).extend([index] * count)
    for rank, where in sorted(stages_by_rank.items()):
        if len(where) > 1:
            yield f"rank {rank} must appear once, but is in stages {where}"
        if not 0 <= rank < world_size:
            yield f"rank ({rank}) must be within 0..world_size - 1 ({world_size - 1})"
    if missing := sorted(set(range(world_size)) - set(stages_by_rank)):
        yield f"every rank must belong to a stage, but none has {_ranges(missing)}"


def _chain_problems(stages: Sequence[StageLayout], chain: tuple[int, ...]) -> Iterator[str]:
    if not chain:
        yield "chain must not be empty"
        return
    known = range(len(stages))
    outside = sorted({stage for stage in chain if stage not in known})
    if outside:
        yield f"chain names stages {outside}, which must be within 0..{len(known) - 1}"
    if unused := sorted(set(known) - set(chain)):
        yield f"chain ({list(chain)}) must visit every stage, but omits {unused}"
    for position, (a, b) in enumerate(pairwise(chain)):
        if a == b:
            yield (
                f"chain positions {position} and {position + 1} are both stage {a}: merge them, "
                f"since nothing is to be transferred"
            )
        elif a in known and b in known:
            yield from _boundary_problems(stages, a, b)


def _boundary_problems(stages: Sequence[StageLayout], a: int, b: int) -> Iterator[str]:
    first, second = stages[a].boundary, stages[b].boundary
    if isinstance(first, Sharded) and isinstance(second, Sharded) and first.dim != second.dim:
        yield (
            f"boundary dim of stage {a} ({first.dim}) must equal that of its neighbour "
            f"stage {b} ({second.dim})"
        )


def _ranges(numbers: list[int]) -> str:
    """Return ascending numbers as text, such as `1..3, 7`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}..{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def dump_layout(
    stages: tuple[StageLayout, ...], chain: tuple[int, ...], world_size: int
) -> dict[str, object]:
    """Return the long form: every stage with its ranks. It has no null, which TOML lacks."""
    return {
        "world_size": world_size,
        "chain": list(chain),
        "stages": [_dump_stage(stage) for stage in stages],
    }


def parse_long(data: Mapping[str, object]) -> tuple[tuple[StageLayout, ...], tuple[int, ...], int]:
    """Return the stages, the chain and the world size of the long form.

    Raises:
        LayoutError: With every problem of types and keys.
    """
    problems = _unknown(data, ("chain", "stages", "world_size"), "layout")
    stages = data.get("stages")
    if not isinstance(stages, list) or not stages:
        problems.append("layout: stages must be a non-empty list (or tp_sizes be given instead)")
        stages = []
    parsed = tuple(_parse_stage(stage, index, problems) for index, stage in enumerate(stages))
    chain = data.get("chain", list(range(len(stages))))
    if not _are_ints(chain):
        problems.append(f"layout: chain ({chain!r}) must be a list of integers")
    world_size = data.get("world_size", 0)
    if not _is_int(world_size) or world_size < 0:
        problems.append(f"layout: world_size ({world_size!r}) must be an integer of at least 0")
    if not problems and _are_ints(chain) and _is_int(world_size):
        return parsed, tuple(chain), world_size
    raise LayoutError(problems)


def parse_short(data: Mapping[str, object]) -> tuple[list[int], int | list[int], str]:
    """Return the sizes, the replicas and the shape of the short form.

    Raises:
        LayoutError: With every problem of types and keys.
    """
    problems = _unknown(data, ("dp", "shape", "tp_sizes"), "layout")
    sizes, dp, shape = data["tp_sizes"], data.get("dp", 1), data.get("shape", "straight")
    if not _are_ints(sizes):
        problems.append(f"layout: tp_sizes ({sizes!r}) must be a list of integers")
    if not _is_int(dp) and not _are_ints(dp):
        problems.append(f"layout: dp ({dp!r}) must be an integer or a list of integers")
    if shape not in {"straight", "u"}:
        problems.append(f"layout: shape ({shape!r}) must be 'straight' or 'u'")
    if not problems and _are_ints(sizes) and (_is_int(dp) or _are_ints(dp)):
        return sizes, dp, str(shape)
    raise LayoutError(problems)


def _parse_stage(data: object, index: int, problems: list[str]) -> StageLayout:
    where = f"stage {index}"
    if not isinstance(data, Mapping):
        problems.append(f"{where}: must be a table, not {type(data).__name__}")
        return StageLayout(())
    problems += _unknown(data, ("boundary", "lanes", "replicas"), where)
    replicas = data.get("replicas")
    if not isinstance(replicas, list) or not all(_are_ints(part) for part in replicas):
        problems.append(f"{where}: replicas ({replicas!r}) must be a list of lists of integers")
        replicas = []
    lanes = data.get("lanes")
    if lanes is not None and not _is_int(lanes):
        problems.append(f"{where}: lanes ({lanes!r}) must be an integer")
        lanes = None
    boundary = _parse_boundary(data.get("boundary", "replicated"), where, problems)
    return StageLayout(tuple(tuple(part) for part in replicas), boundary, lanes)


def _parse_boundary(data: object, where: str, problems: list[str]) -> Placement:
    if data == "replicated":
        return Replicated()
    if isinstance(data, Mapping) and set(data) == {"sharded"} and _is_int(data["sharded"]):
        return Sharded(data["sharded"])
    problems.append(f"{where}: boundary ({data!r}) must be 'replicated' or {{sharded = DIM}}")
    return Replicated()


def _dump_stage(stage: StageLayout) -> dict[str, object]:
    boundary = stage.boundary
    data: dict[str, object] = {
        "replicas": [list(part) for part in stage.replicas],
        "boundary": {"sharded": boundary.dim} if isinstance(boundary, Sharded) else "replicated",
    }
    if stage.lanes is not None:
        data["lanes"] = stage.lanes
    return data


def _unknown(data: Mapping[str, object], known: tuple[str, ...], where: str) -> list[str]:
    return [
        f"{where}: unknown key {key!r}, must be one of {', '.join(known)}"
        for key in data
        if key not in known
    ]


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_ints(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(_is_int(item) for item in value)
