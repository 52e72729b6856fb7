"""Whether ranks that make a group make the same one, and whether its ranks are who connected.

Ranks that make groups in different orders would hang.

Note [strangers]. Gloo asks nobody who connects for a proof: it takes whoever first names a number
that can be guessed for the rank that it waits for, and any user of a machine can connect to a port
of its loopback interface. So every rank shows each other one, through the group itself, that it has
read a secret in the store of the default group. A stranger gets no further: what the rank itself
has sent waits at the real end of another connection, and the exchange fails or times out.

That is worth as much as the store: one in a file of this user is his alone, one that listens on a
port can be read by whoever can reach that.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_platform import _internals

_SECRET_DIGITS = 64
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
    theirs, secret = told[:-_SECRET_DIGITS], told[-_SECRET_DIGITS:]
    if theirs != call:
        raise ValueError(
            f"rank {rank}: new_group call {number} ({what[:200]}) must equal that of rank "
            f"{everyone[0]} ({theirs[:-64]}): every rank makes every group in one order"
        )
    return Call(key, secret)


def new_secret() -> str:
    """Return what only those know who can read the store; `_SECRET_DIGITS` hexadecimal digits."""
    return secrets.token_hex(_SECRET_DIGITS // 2)


def require_members(group: ProcessGroup, *, secret: str, name: str) -> None:
    """Refuse a Gloo group in which another process has connected in the place of a rank.

    Every rank of the group calls this. NCCL is left alone: its id has a secret of its own.

    Args:
        group: New process group.
        secret: The same on all ranks of the default group.
        name: Name of the group, for the message.

    Raises:
        RuntimeError: If it is so.
    """
    if group.size() == 1 or _internals.backend_name(group, torch.device("cpu")) != "gloo":
        return
    me, ranks = group.rank(), dist.get_process_group_ranks(group)
    shown = torch.cat([_proof(secret, ranks, me, other) for other in range(len(ranks))])
    seen = torch.empty_like(shown)
    # Not a gather, which goes around a ring and does not use the connections of all pairs.
    dist.all_to_all_single(seen, shown, group=group)
    for other, proof in enumerate(seen.chunk(len(ranks))):
        if not torch.equal(proof, _proof(secret, ranks, other, me)):
            raise RuntimeError(
                f"rank {ranks[me]}: a stranger has connected as rank {ranks[other]} of the group "
                f"{name}: another user of this machine or network interferes with this run"
            )


def _proof(secret: str, ranks: list[int], sender: int, receiver: int) -> Tensor:
    text = f"{ranks} {sender} {receiver}".encode()
    digest = bytearray(hmac.digest(bytes.fromhex(secret), text, "sha256"))
    return torch.frombuffer(digest, dtype=torch.uint8)
