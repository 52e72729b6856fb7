"""Which rank a stage lives on."""

from typing import Literal, get_args

PlacementStyle = Literal["loop", "v"]


def generate_stage_to_rank_mapping(
    num_ranks: int, num_stages: int, style: PlacementStyle = "loop"
) -> dict[int, int]:
    """Return the rank of every stage.

    Args:
        num_ranks: Number of ranks, at least 1.
        num_stages: Number of stages, at least one per rank; for ``v`` a multiple of num_ranks.
        style: ``loop`` deals the stages out like cards (0, 1, 2, 0, 1, 2); ``v`` turns round at
            each end (0, 1, 2, 2, 1, 0), so that neighbours at a turn share a rank.

    Raises:
        ValueError: If a count does not fit or the style is unknown.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks ({num_ranks}) must be >= 1")
    if num_stages < num_ranks:
        raise ValueError(f"num_stages ({num_stages}) must be >= num_ranks ({num_ranks})")
    if style == "loop":
        return {stage: stage % num_ranks for stage in range(num_stages)}
    if style != "v":
        names = " or ".join(get_args(PlacementStyle))
        raise ValueError(f"style ({style}) must be {names}")
    if num_stages % num_ranks:
        raise ValueError(
            f"num_stages ({num_stages}) must be a multiple of num_ranks ({num_ranks}) for style v"
        )
    there_and_back = [*range(num_ranks), *reversed(range(num_ranks))]
    return {stage: there_and_back[stage % (2 * num_ranks)] for stage in range(num_stages)}


def generate_rank_to_stage_mapping(
    num_ranks: int, num_stages: int, style: PlacementStyle = "loop"
) -> dict[int, list[int]]:
    """Return the stages of every rank, ascending; see `generate_stage_to_rank_mapping`.

    Raises:
        ValueError: If a count does not fit or the style is unknown.
    """
    stages: dict[int, list[int]] = {rank: [] for rank in range(num_ranks)}
    for stage, rank in generate_stage_to_rank_mapping(num_ranks, num_stages, style).items():
        stages[rank].append(stage)
    return stages
