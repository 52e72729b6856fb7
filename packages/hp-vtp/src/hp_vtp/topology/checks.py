"""Checks of a layout: every problem as one line."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from hp_vtp.topology.stages import Sharded, StageLayout


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
