"""Whether those that connected in a group are its ranks.

Note [strangers]. Gloo asks nobody who connects for a proof: it takes whoever first names a number
that can be guessed for the rank that it waits for, and any user of a machine can connect to a port
of its loopback interface. So every rank shows each other one, through the group itself, that it has
read a secret in the store of the default group. A stranger gets no further: what the rank itself
has sent waits at the real end of another connection, and the exchange fails or times out.

That is worth as much as the store: one in a file of this user is his alone, one that listens on a
port can be read by whoever can reach that.
"""

from __future__ import annotations

import hmac
import secrets

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_platform import _internals

SECRET_DIGITS = 64


def new_secret() -> str:
    """What only those know who can read the store; `SECRET_DIGITS` hexadecimal digits."""
    return secrets.token_hex(SECRET_DIGITS // 2)


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
    digest = hmac.digest(bytes.fromhex(secret), text, "sha256")
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)
