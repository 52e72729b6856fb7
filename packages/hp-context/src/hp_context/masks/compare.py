"""The comparison of a call between ranks, before they exchange anything that depends on it.

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

Shape symbols: N ranks, s local sequence.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_context.masks import Both, Causal, EachSequence, Full, Mask, SlidingWindow
from hp_platform import agree, mark_agreed
from hp_platform.groups import global_ranks
from hp_platform.threads import note_use

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
