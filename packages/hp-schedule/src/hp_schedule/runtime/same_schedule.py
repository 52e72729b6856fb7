"""Check that all ranks run one schedule: with different ones their messages would be mixed up.

Messages have no tags (hp_schedule.runtime.transport), so a rank cannot see that what it receives is
of another microbatch than its own schedule says: gradients would be wrong without a word.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

import torch.distributed as dist

from hp_platform import all_gather_json
from hp_schedule.packing import FSDP_KINDS, KIND_MASK, RETENTION_KINDS
from hp_schedule.schedule import Schedule

_OF_ONE_RANK = FSDP_KINDS | RETENTION_KINDS


def check_same_schedule(schedule: Schedule, ranks: Sequence[int]) -> None:
    """Refuse schedules that differ; every rank of the world calls this, and all of them raise.

    Steps that concern no other rank (FSDP, RECOMPUTE, OFFLOAD and RELOAD) may differ.

    Args:
        schedule: Schedule of this rank.
        ranks: The global ranks of its pipeline.

    Raises:
        ValueError: If ranks of one pipeline have different schedules, or pipelines different edges.
    """
    facts = _Facts(tuple(ranks), schedule.edges, _digest(schedule))
    every = all_gather_json(facts, of=_Facts, group=dist.group.WORLD)
    first: dict[tuple[int, ...], int] = {}
    for rank, (pipeline, edges, digest) in enumerate(every):
        same = first.setdefault(pipeline, rank)
        if digest != every[same].digest:
            raise ValueError(
                f"schedule of rank {rank} must equal that of rank {same}; if it was searched, do "
                "so on one rank and send it to the others"
            )
        if edges != every[0].edges:
            raise ValueError(
                f"edges of the schedule of rank {rank} ({edges}) must equal those of rank 0 "
                f"({every[0].edges})"
            )


class _Facts(NamedTuple):
    """Facts that ranks compare: the ranks of the pipeline, its edges, a digest of its steps."""

    pipeline: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    digest: str


def _digest(schedule: Schedule) -> str:
    shape = schedule.chains, schedule.stage_to_rank, schedule.num_microbatches
    found = sha256(repr(shape).encode())
    for row in schedule.steps:
        kept = array("q", filter(_concerns_others, row.codes()))
        found.update(len(kept).to_bytes(8, "little") + kept.tobytes())
    return found.hexdigest()


def _concerns_others(code: int) -> bool:
    return code >= 0 and code & KIND_MASK not in _OF_ONE_RANK
