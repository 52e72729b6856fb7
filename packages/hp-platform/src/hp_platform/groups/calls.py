"""That ranks which make a group together make the same one: a wrong order would end in a hang."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from hp_platform import _internals
from hp_platform.groups.membership import SECRET_DIGITS, new_secret

_calls: Counter[tuple[int, ...]] = Counter()
"""By the ranks that take part, how often this process has taken part."""


class Call(NamedTuple):
    """One call that several ranks make together.

    Attributes:
        key: Key of the call in the store; the same on all of its ranks, and no other call has it.
        secret: Secret that the first of the ranks has made up for the call.
    """

    key: str
    secret: str


def agree_on_call(what: str, ranks: Sequence[int]) -> Call:
    """Compare a call with that of the first of the ranks that make it.

    Args:
        what: All arguments as a text; the same on all ranks.
        ranks: Who takes part: global ranks, among them this one.

    Raises:
        ValueError: If the calls differ.
    """
    rank, everyone = dist.get_rank(), tuple(ranks)
    number = _calls[everyone]
    _calls[everyone] += 1
    who = "all"
    if everyone != tuple(range(dist.get_world_size())):
        who = hashlib.sha256(str(everyone).encode()).hexdigest()[:16]
    key = f"hp_platform/new_group/{who}/{number}"
    store = _internals.default_store()
    call = what[:200] + hashlib.sha256(what.encode()).hexdigest()
    if rank == everyone[0]:
        secret = new_secret()
        store.set(key, call + secret)
        return Call(key, secret)
    told = store.get(key).decode()
    theirs, secret = told[:-SECRET_DIGITS], told[-SECRET_DIGITS:]
    if theirs != call:
        raise ValueError(
            f"rank {rank}: new_group call {number} ({what[:200]}) must equal that of rank "
            f"{everyone[0]} ({theirs[:-64]}): every rank makes every group in one order"
        )
    return Call(key, secret)
