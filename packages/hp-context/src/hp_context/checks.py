"""Checks of a call on one rank and between ranks, before they exchange anything that depends on it.

Note [When ranks compare]
    In the first call with a shape, the first call of each core attention, and the first call with a
    mask that comes with the data: once in a microbatch, not in each layer, and not in backward or
    when something is computed again. Also when a core attention gets no such mask after it had one:
    the others may have a new one. It costs one all-gather of some numbers and one host read.
    All ranks must come to that all-gather or none. So a mask is new by who it is, never by what it
    says: a rank whose documents differ would otherwise be alone in finding them new, or known. The
    masks that have been compared carry the names of the groups, for as long as they live; a layer
    that combines them anew (`Causal() & documents`) finds them again. Full, causal and window
    masks come with the model: they are compared when something else is.

Shape symbols: N ranks, s local sequence, H query heads, G key/value heads, D head size.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hp_context.masks import Both, Causal, EachSequence, Full, Mask, SlidingWindow
from hp_platform import agree, mark_agreed
from hp_platform.groups import global_ranks
from hp_platform.threads import note_use


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


_COMPARED = "_hp_context_compared"
_OF_THE_MODEL = Full | Causal | SlidingWindow


def is_new(mask: object, group: ProcessGroup) -> bool:
    """Tell whether a mask has something that the ranks of a group have not compared yet.

    Args:
        mask: Argument of a call: also None, a tensor, which is never compared, or nonsense.
        group: The ranks that share the sequence.
    """
    if mask is None or isinstance(mask, Tensor):
        return False
    if not isinstance(mask, Mask):
        return True
    name = group.group_name
    return any(name not in part.__dict__.get(_COMPARED, ()) for part in _of_the_data(mask))


def is_of_the_data(mask: object) -> bool:
    """Tell whether a mask has parts that differ between microbatches, as documents do."""
    return isinstance(mask, Mask) and any(True for _ in _of_the_data(mask))


def set_compared(mask: Mask, group: ProcessGroup) -> None:
    """Remember that the ranks of a group have the same mask."""
    for part in _of_the_data(mask):
        part.__dict__.setdefault(_COMPARED, set()).add(group.group_name)


def digest(value: object) -> int:
    """Return 63 bits that tell values apart, the same in every process.

    Takes numbers, strings, ranges, types and what is made of them: tuples, and dataclasses, by the
    fields that make them equal. Of a function the name counts, of any other object its type.
    """
    code = blake2b(repr(_plain(value)).encode(), digest_size=8)
    return int.from_bytes(code.digest(), "big") >> 1


def compare(
    error: Exception | None,
    facts: Mapping[str, object],
    *,
    group: ProcessGroup,
    device: torch.device,
    content: Tensor | None = None,
) -> list[list[int]]:
    """Compare facts that must be equal on all ranks; all of them call, and all raise or none.

    Args:
        error: Error of this rank; None if all is well.
        facts: Facts by name, as many on every rank and in one order; see `digest`.
        group: The ranks that share the sequence.
        device: Device on which they communicate.
        content: int64 [n] on `device`, which is exchanged without a comparison.

    Returns:
        The content of each rank.

    Raises:
        Exception: `error`.
        PeerError: Another rank has an error; the message has it.
        ValueError: Ranks differ in a fact; the message names them.
    """
    note_use(group)
    numbers = [error is not None, *(digest(fact) for fact in facts.values())]
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    if content is not None:
        mine = torch.cat([mine, content])
    gathered = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(gathered, mine, group=group)
    rows: list[list[int]] = torch.stack(gathered).tolist()
    if any(row[0] for row in rows):
        agree(error, group=group, where="attention", device=device)
    for column, (name, fact) in enumerate(facts.items(), start=1):
        require_alike(name, [row[column] for row in rows], group=group, here=fact)
    return [row[len(numbers) :] for row in rows]


def require_alike(
    name: str, found: Sequence[Hashable], *, group: ProcessGroup, here: object
) -> None:
    """Raise on all ranks unless they have the same values.

    Args:
        name: Name of the values, in the plural.
        found: Value of each rank.
        group: The ranks.
        here: Value of this rank, for the message.

    Raises:
        ValueError: Names the ranks that differ from most.
    """
    usual = Counter(found).most_common(1)[0][0]
    ranks = global_ranks(group)
    differing = [rank for rank, value in zip(ranks, found, strict=True) if value != usual]
    if not differing:
        return
    others = [rank for rank in ranks if rank not in differing]
    error = ValueError(
        f"{name} of ranks {differing} must equal those of ranks {others}; on rank "
        f"{ranks[group.rank()]}: {_short(here)}"
    )
    mark_agreed(error, ranks)
    raise error


def _of_the_data(mask: Mask) -> Iterator[Mask]:
    """Yield the parts of a mask that may differ between microbatches."""
    if isinstance(mask, Both):
        yield from _of_the_data(mask.first)
        yield from _of_the_data(mask.second)
    elif isinstance(mask, EachSequence):
        for each in mask.masks:
            yield from _of_the_data(each)
    elif not isinstance(mask, _OF_THE_MODEL):
        yield mask


def _plain(value: object) -> object:
    if value is None or isinstance(value, (bool, int, float, str, range)):
        return value
    if isinstance(value, (tuple, list)):
        # Lengths of documents may be many; they are numbers, and quick to write.
        return value if all(type(each) is int for each in value) else tuple(map(_plain, value))
    kind = type(value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = [_plain(getattr(value, each.name)) for each in fields(value) if each.compare]
        return (kind.__module__, kind.__qualname__, *parts)
    named = value if hasattr(value, "__qualname__") else kind
    return named.__module__, named.__qualname__


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:150]} ... {text[-40:]}"
