"""Checks of a new group: all ranks make the same group, and its members are ranks of this run.

Ranks that make groups in different orders would hang.

Gloo does not authenticate connections. It accepts the first process that sends a number, which can
be guessed, as the rank that it waits for, and any user of a machine can connect to a port of its
loopback interface. So every rank proves to every other rank, through the group itself, that it has
read a secret in the store of the default group. A stranger fails the proof: the message of the real
rank waits at another connection, and the exchange fails or times out.

The proof is as safe as the store: only this user can read a store in a file, but any process that
can connect to a store on a port can read that store.
"""

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
"""Number of calls in which this process has taken part, by the ranks of the calls."""


class Call(NamedTuple):
    """Call that several ranks make together.

    Attributes:
        key: Key of the call in the store, the same on all its ranks and different for other calls.
        secret: Random secret from the first of the ranks.
    """

    key: str
    secret: str


def agree_on_call(what: str, ranks: Sequence[int]) -> Call:
    """Check that all ranks make the same call, by comparing with the call of the first rank.

    Args:
        what: All arguments as a text, which must be the same on all ranks.
        ranks: Global ranks that make the call, this rank among them.

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
    text = store.get(key).decode()
    theirs, secret = text[:-_SECRET_DIGITS], text[-_SECRET_DIGITS:]
    if theirs != call:
        raise ValueError(
            f"rank {rank}: new_group call {number} ({what[:200]}) must equal that of rank "
            f"{everyone[0]} ({theirs[:-64]}): every rank makes every group in one order"
        )
    return Call(key, secret)


def new_secret() -> str:
    """Return a random secret for readers of the store: `_SECRET_DIGITS` hexadecimal digits."""
    return secrets.token_hex(_SECRET_DIGITS // 2)


def require_members(group: ProcessGroup, *, secret: str, name: str) -> None:
    """Refuse a Gloo group to which another process has connected in place of a rank.

    Every rank of the group calls this. Groups of NCCL are not checked: its id contains a secret.

    Args:
        group: New process group.
        secret: Secret that all ranks of the default group share.
        name: Name of the group, for the message.

    Raises:
        RuntimeError: If the proof of a member is wrong.
    """
    if group.size() == 1 or _internals.backend_name(group, torch.device("cpu")) != "gloo":
        return
    me, ranks = group.rank(), dist.get_process_group_ranks(group)
    shown = torch.cat([_proof(secret, ranks, me, other) for other in range(len(ranks))])
    seen = torch.empty_like(shown)
    # An all-to-all uses the connections of all pairs; a gather would use a ring only.
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
