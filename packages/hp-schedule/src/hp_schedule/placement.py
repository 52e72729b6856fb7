"""Placements: the rank of every stage, and the stages of every rank."""

from collections.abc import Sequence
from typing import Literal, get_args

PlacementStyle = Literal["loop", "v", "u"]


def generate_stage_to_rank_mapping(
    num_ranks: int, num_stages: int, style: PlacementStyle | Sequence[int] = "loop"
) -> dict[int, int]:
    """Return the rank of every stage, in their order.

    Args:
        num_ranks: Number of ranks, at least 1.
        num_stages: Number of stages, at least one per rank; for ``v`` a multiple of num_ranks, for
            ``u`` one more than a multiple.
        style: ``loop`` deals the stages out like cards (0, 1, 2, 0, 1, 2). ``v`` turns round at
            each end (0, 1, 2, 2, 1, 0), so that neighbours at a turn share a rank. ``u`` is a loop
            that ends where it began (0, 1, 2, 0): rank 0 has the first stage and the last. A
            sequence gives any other chain as the rank of each stage in order.

    Raises:
        ValueError: If a count does not fit, the style is unknown, or a chain leaves a rank out.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks ({num_ranks}) must be >= 1")
    if num_stages < num_ranks:
        raise ValueError(f"num_stages ({num_stages}) must be >= num_ranks ({num_ranks})")
    if not isinstance(style, str):
        return _chain(num_ranks, num_stages, style)
    if style not in get_args(PlacementStyle):
        raise ValueError(
            f"style ({style}) must be {' or '.join(get_args(PlacementStyle))}, or a rank for each "
            "stage"
        )
    if style == "v":
        if num_stages % num_ranks:
            raise ValueError(
                f"num_stages ({num_stages}) must be a multiple of num_ranks ({num_ranks}) for "
                "style v"
            )
        there_and_back = [*range(num_ranks), *reversed(range(num_ranks))]
        return {stage: there_and_back[stage % (2 * num_ranks)] for stage in range(num_stages)}
    if style == "u" and (num_stages - 1) % num_ranks:
        raise ValueError(
            f"num_stages ({num_stages}) must be one more than a multiple of num_ranks "
            f"({num_ranks}) for style u"
        )
    return {stage: stage % num_ranks for stage in range(num_stages)}


def generate_rank_to_stage_mapping(
    num_ranks: int, num_stages: int, style: PlacementStyle | Sequence[int] = "loop"
) -> dict[int, list[int]]:
    """Return the stages of every rank, ascending; see `generate_stage_to_rank_mapping`.

    Raises:
        ValueError: If a count does not fit, the style is unknown, or a chain leaves a rank out.
    """
    stages: dict[int, list[int]] = {rank: [] for rank in range(num_ranks)}
    for stage, rank in generate_stage_to_rank_mapping(num_ranks, num_stages, style).items():
        stages[rank].append(stage)
    return stages


def _chain(num_ranks: int, num_stages: int, ranks: Sequence[int]) -> dict[int, int]:
    if len(ranks) != num_stages:
        raise ValueError(f"len(style) ({len(ranks)}) must equal num_stages ({num_stages})")
    for stage, rank in enumerate(ranks):
        if not 0 <= rank < num_ranks:
            raise ValueError(
                f"rank ({rank}) of stage {stage} must be >= 0 and < num_ranks ({num_ranks})"
            )
    missing = set(range(num_ranks)) - set(ranks)
    if missing:
        raise ValueError(f"rank ({min(missing)}) must have a stage")
    return dict(enumerate(ranks))
