"""What ranks tell each other before rows travel: their verdict, and how much they will send.

Where tokens were cut into slices first, a rank speaks for all slices of its tokens.

Shape symbols: W ranks, Z slices, L local experts, B numbers in a block.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hp_expert.dispatch.agreement import Header, block_size
from hp_expert.dispatch.deduplicated import Destinations
from hp_expert.permute import SlotCounts
from hp_platform import Event, Pending, side_stream, use_stream
from hp_platform.host_reads import arrived

# A block: code of the header, slots with experts that do not exist, tokens before they were cut
# into slices, rows if they are deduplicated, most slots of such a row, then the slots of each of
# the receiver's experts.
CODE, INVALID, TOKENS, ROWS, MOST, COUNTS = range(6)


class Volume(NamedTuple):
    """What crosses between this rank and each other one.

    Attributes:
        sent: Rows or slots that this rank sends to each rank, W numbers.
        received: Rows or slots that it receives from each rank, W numbers.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]


class Heard(NamedTuple):
    """What all ranks told this one, and it told them, about one slice.

    Attributes:
        num_invalid: Slots of this rank whose experts do not exist.
        verdicts: Verdict of each rank: code of its header, number of its invalid slots.
        tokens: Tokens of each rank before they were cut into slices; 0 if they were not.
        slots: Slots sent and received.
        rows: Rows sent and received, if they are deduplicated.
        counts: Slots of each local expert.
        most: Most slots of a received row, if they are deduplicated.
        counts_by_rank: Slots from each rank for each local expert, on the device, [W, L].
    """

    num_invalid: int
    verdicts: list[list[int]]
    tokens: tuple[int, ...]
    slots: Volume
    rows: Volume
    counts: tuple[int, ...]
    most: int
    counts_by_rank: Tensor


def announcement(
    header: Header,
    counted: SlotCounts | None,
    where: Destinations | None,
    *,
    num_ranks: int,
    num_local: int,
    num_tokens: int = 0,
    device: torch.device,
) -> Tensor:
    """Return the block for each rank, int64 [W, B].

    Args:
        header: Header of this rank's input.
        counted: Its slots; None if the input is wrong.
        where: Its rows, if they are deduplicated.
        num_ranks: Number of ranks, W.
        num_local: Number of local experts of a rank, L.
        num_tokens: Number of tokens before they were cut into slices; 0 if they were not.
        device: Device of the result.
    """
    told = torch.full((num_ranks, block_size(COUNTS + num_local)), header.code, device=device)
    told[:, TOKENS] = num_tokens
    if counted is not None:
        num_experts = num_ranks * num_local
        told[:, INVALID] = counted.counts[num_experts + 1]
        told[:, COUNTS : COUNTS + num_local] = counted.counts[:num_experts].view(num_ranks, -1)
    if where is not None:
        told[:, ROWS], told[:, MOST] = where.num_rows(), where.most_slots()
    return told


def listen(
    told: Tensor, exchange: Pending[Tensor], *, num_local: int, purpose: object
) -> list[Heard]:
    """Wait for the blocks of the others [W, Z, B] and read all of them on the host, by slice."""
    heard, mine, theirs = read_exchange(
        told, exchange, num_columns=COUNTS + num_local, purpose=purpose
    )
    return [
        _of_slice(
            [blocks[z] for blocks in mine],
            [blocks[z] for blocks in theirs],
            heard[:, z, COUNTS : COUNTS + num_local],
        )
        for z in range(told.shape[1])
    ]


def _of_slice(mine: list[list[int]], theirs: list[list[int]], counts_WL: Tensor) -> Heard:
    codes, invalid, tokens, received_rows, most, *counts = zip(*theirs, strict=True)
    sent_rows = tuple([block[ROWS] for block in mine])
    sent = tuple([sum(block[COUNTS:]) for block in mine])
    received = tuple(map(sum, zip(*counts, strict=True)))
    return Heard(
        num_invalid=mine[0][INVALID],
        verdicts=list(map(list, zip(codes, invalid, strict=True))),
        tokens=tokens,
        slots=Volume(sent, received),
        rows=Volume(sent_rows, received_rows),
        counts=tuple(map(sum, counts)),
        most=max(most),
        counts_by_rank=counts_WL,
    )


def read_exchange(
    told: Tensor, exchange: Pending[Tensor], *, num_columns: int, purpose: object
) -> tuple[Tensor, Any, Any]:
    """Wait for an exchange of numbers and read both sides of it: the only host read of a layer.

    On CUDA the read goes through a stream of its own: it waits for the exchange, and not for what
    the current stream was given since, such as the gather of the rows.

    Args:
        told: What was sent [W, ..., B].
        exchange: Pending exchange of `told`.
        num_columns: How many of each block to read.
        purpose: Purpose of the read, from which a dry run knows the numbers.

    Returns:
        What was heard on the device; what was told and what was heard on the host.
    """
    if told.device.type != "cuda":
        heard = exchange.wait()
        both = torch.stack([told[..., :num_columns], heard[..., :num_columns]])
        return heard, *arrived(both, purpose=purpose).tolist()
    done, stream = Event(told.device), side_stream(told.device, "read counts")
    with use_stream(stream):
        heard = exchange.wait()
        both = torch.stack([told[..., :num_columns], heard[..., :num_columns]])
        with _landings.lend(both) as on_host:
            on_host.copy_(both, non_blocking=True)
            done.record(stream)
            # Also keeps `told` and `both` alive for as long as the other stream reads them.
            done.synchronize()
            mine, theirs = arrived(on_host, purpose=purpose).tolist()
    done.wait()
    return heard, mine, theirs


class _Landings:
    """Pinned memory that copies to the host land in; each piece serves one read at a time."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []  # adding and taking are one step each, in any thread

    @contextmanager
    def lend(self, source: Tensor) -> Iterator[Tensor]:
        """Memory of the shape and dtype of `source` for as long as the context lasts."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        if memory.numel() < source.nbytes:
            size = max(_SMALLEST, 1 << (source.nbytes - 1).bit_length())
            memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        yield memory[: source.nbytes].view(source.dtype).view(source.shape)
        self._free.append(memory)  # not after an error: the device may yet write to it


_SMALLEST = 1 << 14
_landings = _Landings()
