"""Which positions of a sequence a rank holds, and moving between the whole and the parts.

The layout is contiguous: rank r of N holds positions r*s ... (r+1)*s - 1. Tokens, labels,
position ids and document ids are split by the same function, so that they cannot disagree.

Shape symbols: S length of the whole sequence, N ranks of the group, s = S / N.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hp_platform import all_gather_uneven, resolve_group


def local_positions(
    seq_len: int,
    mesh_or_group: DeviceMesh | dist.ProcessGroup,
    *,
    device: torch.device | None = None,
) -> Tensor:
    """Return the global positions this rank holds: int64 [s], the input of rotary embeddings.

    Raises:
        ValueError: N does not divide `seq_len` (S).
    """
    group = resolve_group(mesh_or_group)
    part = _part(seq_len, group.size())
    return torch.arange(group.rank() * part, (group.rank() + 1) * part, device=device)


def shard_sequence(
    x: Tensor, mesh_or_group: DeviceMesh | dist.ProcessGroup, *, seq_dim: int = 1
) -> Tensor:
    """Return this rank's part of `x`, which every rank holds whole.

    Args:
        x: S at `seq_dim`, any other dimensions, any dtype.
        mesh_or_group: The ranks that share the sequence: a 1-D mesh or a group.
        seq_dim: Dimension of the sequence.

    Returns:
        A contiguous copy with s at `seq_dim`.

    Raises:
        ValueError: N does not divide S.
    """
    group = resolve_group(mesh_or_group)
    part = _part(x.size(seq_dim), group.size())
    return x.narrow(seq_dim, group.rank() * part, part).clone(memory_format=torch.contiguous_format)


def unshard_sequence(
    x: Tensor, mesh_or_group: DeviceMesh | dist.ProcessGroup, *, seq_dim: int = 1
) -> Tensor:
    """Return the whole of what `shard_sequence` split, on every rank.

    Differentiable: the gradient of a part is the sum of what all ranks computed from it. A
    loss that every rank computes from the whole is hence counted N times.

    Args:
        x: s at `seq_dim`, the same shape on every rank.
        mesh_or_group: The ranks that share the sequence.
        seq_dim: Dimension of the sequence.

    Returns:
        Like `x` with S at `seq_dim`.
    """
    group = resolve_group(mesh_or_group)
    sizes = [x.size(seq_dim)] * group.size()
    whole: Tensor = all_gather_uneven(x.contiguous(), sizes=sizes, dim=seq_dim, group=group)
    return whole


def _part(seq_len: int, num_ranks: int) -> int:
    if seq_len % num_ranks:
        missing = -seq_len % num_ranks
        raise ValueError(
            f"sequence length ({seq_len}) must be divisible by the number of ranks "
            f"({num_ranks}); pad it by {missing}"
        )
    return seq_len // num_ranks
