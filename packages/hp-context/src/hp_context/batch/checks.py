"""Checks of q, k, v before anything is exchanged: on one rank, and between ranks.

Shape symbols: N ranks, s local sequence, H query heads, G key/value heads, D head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hp_platform import mark_agreed
from hp_platform.groups import global_ranks


@dataclass(frozen=True, slots=True)
class Dims:
    """Dims of the sequence and of the heads: (1, 2) in [B, s, H, D], (2, 1) in [B, H, s, D]."""

    seq: int
    head: int

    def __post_init__(self) -> None:
        if self.seq < 0 or self.head < 0:
            raise ValueError(f"seq_dim ({self.seq}) and head_dim ({self.head}) must be >= 0")
        if self.seq == self.head:
            raise ValueError(f"seq_dim ({self.seq}) must differ from head_dim ({self.head})")


def check_two_axes(mesh: DeviceMesh, degree: int) -> None:
    """Raise `ValueError` unless `mesh` has two named axes, outer and inner, the inner of `degree`.

    Without a degree two axes may as well be data parallel and context parallel ones.
    """
    if mesh.ndim != 2 or mesh.mesh_dim_names is None:
        raise ValueError(
            f"mesh ({mesh.mesh_dim_names}, {mesh.ndim} axes) must have one named axis, or two: "
            f"the outer one gathers keys, the inner one shares heads"
        )
    if mesh.size(1) != degree:
        raise ValueError(
            f"ulysses_degree ({degree}) must equal the size of the inner axis "
            f"{mesh.mesh_dim_names[1]} ({mesh.size(1)})"
        )


def check_local(q: Tensor, k: Tensor, v: Tensor, *, dims: Dims, num_ranks: int) -> None:
    """Raise `ValueError` if q, k, v of this rank cannot be exchanged over `num_ranks` ranks."""
    named = {"q": q, "k": k, "v": v}
    for name, x in named.items():
        if x.ndim != q.ndim or x.ndim <= max(dims.seq, dims.head) + 1:
            raise ValueError(
                f"{_shapes(named)}: dims must agree and end with the head size, after "
                f"seq_dim ({dims.seq}) and head_dim ({dims.head})"
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} ({x.dtype} on {x.device}) must match q ({q.dtype} on {q.device})"
            )
        length, queries = x.size(dims.seq), q.size(dims.seq)
        if length != queries and _without(x, dims.seq) == _without(q, dims.seq):
            raise ValueError(
                f"length of {name} ({length}, seq_dim {dims.seq}) must equal that of q "
                f"({queries}); is the layout seq_dim={dims.head}, head_dim={dims.seq}? "
                f"Cross-attention exchanges nothing: let every rank keep all of k and v, and call "
                f"attention on its part of q"
            )
        if _without(x, dims.head) != _without(q, dims.head):
            raise ValueError(
                f"{_shapes(named)}: all dims but head_dim ({dims.head}) and the last must agree; "
                f"is the layout seq_dim={dims.head}, head_dim={dims.seq}?"
            )
    _check_heads(q.size(dims.head), k.size(dims.head), v.size(dims.head), num_ranks)
    if k.size(-1) != q.size(-1):
        raise ValueError(f"head size of k ({k.size(-1)}) must equal that of q ({q.size(-1)})")


def _check_heads(num_heads: int, num_kv_heads: int, num_v_heads: int, num_ranks: int) -> None:
    if num_kv_heads != num_v_heads:
        raise ValueError(f"heads of k ({num_kv_heads}) must equal heads of v ({num_v_heads})")
    if num_heads % num_kv_heads:
        raise ValueError(f"heads of k ({num_kv_heads}) must divide heads of q ({num_heads})")
    if num_heads < num_ranks:
        raise ValueError(
            f"ulysses_degree ({num_ranks}) must be <= heads of q ({num_heads}); ranks may gather "
            f"keys instead: ulysses_degree=1, or what divides the number of ranks"
        )


def content_of(q: Tensor, *, dims: Dims) -> Tensor:
    """Return int64 [2]: whether the values of q vary along the sequence, and the bits of their sum.

    Equal positions, such as padding, say nothing about how a sequence was split.
    """
    values = q.detach()
    total = values.sum(dtype=torch.float64)
    varies = (values != values.narrow(dims.seq, 0, 1)).any() & total.isfinite()
    return torch.stack([varies.to(torch.int64), total.view(torch.int64)])


def check_parts(contents: list[list[int]], q: Tensor, *, group: ProcessGroup) -> None:
    """Raise on all ranks if they hold the same values: a full sequence instead of a part.

    Args:
        contents: `content_of` each rank.
        q: Queries of this rank, for the message.
        group: The ranks that share the sequence.

    Raises:
        ValueError: They do.
    """
    varies, sums = all(row[0] for row in contents), {row[1] for row in contents}
    if varies and len(sums) == 1 and group.size() > 1:
        error = ValueError(
            f"q ({tuple(q.shape)}) must be this rank's part of the sequence, but all "
            f"{group.size()} ranks passed the same values: split them with shard_sequence"
        )
        mark_agreed(error, global_ranks(group))
        raise error


def _without(x: Tensor, dim: int) -> tuple[int, ...]:
    return tuple(size for i, size in enumerate(x.shape[:-1]) if i != dim)


def _shapes(named: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} ({tuple(x.shape)})" for name, x in named.items())
