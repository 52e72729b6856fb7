"""The exchange plan of a dispatch: the rows between ranks, on which all ranks agree beforehand.

Every rank counts its slots of each expert (`count_block`), and one small all-to-all tells every
rank what it will receive. `agreed_plans` reads the numbers sent and received on the host, once; all
splits, sizes and buffers of the layer follow from them (`ExchangePlan`). In a dry run nothing was
counted, and an `ExchangeRead` gives the numbers. `hp_expert.dispatch.deduplicated` has the bytes
of such a plan on average.

Note [All or none]. A rank that raised on its own would leave the others waiting for its rows. Every
rank therefore sends a verdict on its input with its counts, at no extra cost; all ranks see the
same verdicts and either all go on or all raise.

Where tokens were cut into slices first, a rank sends the counts of all slices of its tokens.

Shape symbols: T tokens, K experts per token, D width, E experts, W ranks, Z slices, L = E / W local
experts, B numbers in a block, C of them that are read.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_expert.batch import FLOATS, wrong_input
from hp_expert.dispatch import refused
from hp_expert.dispatch.deduplicated import Destinations
from hp_expert.permute import SlotCounts
from hp_platform import Event, PeerError, Pending, agree, side_stream, use_stream
from hp_platform.dry_device import arrived

_NO_WEIGHTS = len(FLOATS)
_GRAIN = 512

# The number of values of each part of a header: dtype of the rows, dtype of the weights, K, number
# of experts, whether rows are deduplicated, and whether rows and weights require gradients.
_RANGES = (len(FLOATS), len(FLOATS) + 1, 1 << 12, 1 << 20, 2, 2, 2)


# The columns of a block: code of the header, slots with experts that do not exist, tokens before
# they were cut into slices, rows if they are deduplicated, most slots of such a row, then the slots
# of each of the receiver's experts.
CODE, INVALID, TOKENS, ROWS, MOST, COUNTS = range(6)
Numbers: TypeAlias = list[list[list[int]]]
"""Blocks on the host, by rank and slice."""


@dataclass(frozen=True, slots=True)
class Header:
    """The properties of the input that all ranks must have in common, as one number.

    Ranks that differ in them would wait for different exchanges, in forward or in backward.

    Attributes:
        code: Width and dtype of the rows, dtype of the routing weights if there are any, number of
            experts per token and of all experts, whether rows are deduplicated, and which tensors
            require gradients; negative if the input is wrong.
    """

    code: int

    @classmethod
    def of(
        cls,
        x: Tensor,
        experts: Tensor,
        weights: Tensor | None,
        *,
        num_experts: int,
        deduplicated: bool = False,
    ) -> "Header":
        """Return the header of a correct input."""
        training = torch.is_grad_enabled()
        values = (
            FLOATS.index(x.dtype),
            _NO_WEIGHTS if weights is None else FLOATS.index(weights.dtype),
            experts.shape[1],
            num_experts,
            int(deduplicated),
            int(training and x.requires_grad),
            int(training and weights is not None and weights.requires_grad),
        )
        code = x.shape[1]
        for value, limit in zip(values, _RANGES, strict=True):
            code = code * limit + value % limit
        return cls(code)

    def __str__(self) -> str:
        """Describe the properties in words."""
        values, width = [], self.code
        for limit in reversed(_RANGES):
            width, value = divmod(width, limit)
            values.append(value)
        weights_grad, x_grad, deduplicated, num_experts, top_k, weights, dtype = values
        words = [
            f"width {width}",
            f"{FLOATS[dtype]}{', with gradient' if x_grad else ''}",
            "no weights" if weights == _NO_WEIGHTS else f"weights {FLOATS[weights]}",
            *(["with gradient"] if weights_grad else []),
            f"{top_k} of {num_experts} experts",
            *(["deduplicated"] if deduplicated else []),
        ]
        return ", ".join(words)


FAILED: Final = Header(-1)
"""The header of a wrong input."""


class Volume(NamedTuple):
    """The rows or slots between this rank and each rank.

    Attributes:
        sent: Number that this rank sends to each rank, W numbers.
        received: Number that this rank receives from each rank, W numbers.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]


class ExchangePlan(NamedTuple):
    """The rows and slots that one slice of the tokens sends and receives, the same on all ranks.

    Attributes:
        num_invalid: Number of slots of this rank whose experts do not exist.
        verdicts: Verdict of each rank: code of its header, number of its invalid slots.
        tokens: Tokens of each rank before they were cut into slices; 0 if they were not.
        slots: Slots sent and received.
        rows: Rows sent and received, if they are deduplicated.
        counts: Number of slots of each local expert.
        most: Most slots of a received row, if rows are deduplicated.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRead:
    """The one host read of a layer: the `purpose` of `hp_platform.dry_device.arrived`.

    Attributes:
        header: Header that every rank sends.
        num_tokens: Number of tokens of this rank, or of its slice.
        told_tokens: Number of tokens in the blocks: 0 where tokens are not cut into slices.
        top_k: Number of experts per token, K.
        num_experts: Number of experts, E.
        rank: Rank in the group that exchanges rows.
        num_ranks: Number of ranks, W; 1 where every rank has all experts.
        tells_rows: Whether blocks contain the number of rows, and the most slots of a row.
    """

    header: Header
    num_tokens: int
    told_tokens: int
    top_k: int
    num_experts: int
    rank: int = 0
    num_ranks: int = 1
    tells_rows: bool = True

    def __str__(self) -> str:
        """Describe the read in words."""
        return f"slots of {self.num_tokens} tokens x {self.top_k} of {self.num_experts} experts"

    def numbers(self, slots: Sequence[int], rows: Sequence[int], *, like: Tensor) -> Tensor:
        """Return the numbers sent and received, as the host would read them in a real run.

        Args:
            slots: Number of slots of a rank's tokens for each expert, E numbers.
            rows: Number of these tokens that go to each rank, each counted once, W numbers.
            like: Tensor that the host is about to read, int64 [2, W or more, Z, C].
        """
        L = self.num_experts // self.num_ranks

        def block(rank: int) -> Tensor:
            about = [self.header.code, 0, self.told_tokens]
            if self.tells_rows:
                about += [rows[rank], min(self.top_k, L) if rows[rank] else 0]
            return torch.tensor([*about, *slots[rank * L : (rank + 1) * L]], device="cpu")

        if self.num_ranks == 1:
            return block(0).expand(like.shape)
        sent = torch.stack([block(rank) for rank in range(self.num_ranks)])
        both = torch.stack([sent, block(self.rank).expand_as(sent)])
        return both.unsqueeze(2).expand(like.shape)


def input_error(x: Tensor, experts: Tensor, weights: Tensor | None) -> Exception | None:
    """Return the error to report of tokens [T, D], experts [T, K] and weights [T, K], or None."""
    return refused.get() or wrong_input(x, experts, weights)


def block_size(num_numbers: int) -> int:
    """Return the size of a block of at least so many numbers.

    Ranks that were given different numbers of experts, or other input that differs, must raise
    instead of waiting for each other: so every rank sends every other rank a block of numbers that
    begins with its header and has the same size for up to about 500 counts (and for up to 1000,
    ...).
    """
    return -(-num_numbers // _GRAIN) * _GRAIN


def count_block(
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
        counted: Slots of the input; None if the input is wrong.
        where: Destinations of its tokens, if rows are deduplicated.
        num_ranks: Number of ranks, W.
        num_local: Number of local experts of a rank, L.
        num_tokens: Number of tokens before they were cut into slices; 0 if they were not.
        device: Device of the result.
    """
    sent = torch.full((num_ranks, block_size(COUNTS + num_local)), header.code, device=device)
    sent[:, TOKENS] = num_tokens
    if counted is not None:
        num_experts = num_ranks * num_local
        sent[:, INVALID] = counted.counts[num_experts]
        sent[:, COUNTS : COUNTS + num_local] = counted.counts[:num_experts].view(num_ranks, -1)
    if where is not None:
        sent[:, ROWS], sent[:, MOST] = where.num_rows(), where.most_slots()
    return sent


def agreed_plans(
    sent: Tensor, exchange: Pending[Tensor], *, num_local: int, purpose: object
) -> list[ExchangePlan]:
    """Wait for the blocks of the other ranks, and read all blocks on the host.

    Args:
        sent: Blocks of this rank, int64 [W, Z, B].
        exchange: Pending all-to-all of `sent`.
        num_local: Number of local experts, L.
        purpose: `ExchangeRead` of this host read.

    Returns:
        The plan of each slice.
    """
    received, mine, theirs = read_counts(
        sent, exchange, num_columns=COUNTS + num_local, purpose=purpose
    )
    return [
        _of_slice(
            [blocks[z] for blocks in mine],
            [blocks[z] for blocks in theirs],
            received[:, z, COUNTS : COUNTS + num_local],
        )
        for z in range(sent.shape[1])
    ]


def _of_slice(mine: list[list[int]], theirs: list[list[int]], counts_WL: Tensor) -> ExchangePlan:
    codes, invalid, tokens, received_rows, most, *counts = zip(*theirs, strict=True)
    sent_rows = tuple([block[ROWS] for block in mine])
    sent = tuple([sum(block[COUNTS:]) for block in mine])
    received = tuple(map(sum, zip(*counts, strict=True)))
    return ExchangePlan(
        num_invalid=mine[0][INVALID],
        verdicts=list(map(list, zip(codes, invalid, strict=True))),
        tokens=tokens,
        slots=Volume(sent, received),
        rows=Volume(sent_rows, received_rows),
        counts=tuple(map(sum, counts)),
        most=max(most),
        counts_by_rank=counts_WL,
    )


def read_counts(
    sent: Tensor, exchange: Pending[Tensor], *, num_columns: int, purpose: object
) -> tuple[Tensor, Numbers, Numbers]:
    """Wait for an exchange of blocks and read those sent and received: a layer's only host read.

    On CUDA the read has a stream of its own: it waits for the exchange, and not for later work of
    the current stream, such as the gather of the rows.

    Args:
        sent: Blocks of this rank [W, Z, B].
        exchange: Pending exchange of `sent`.
        num_columns: Number of columns of each block to read.
        purpose: Purpose of the read, from which a dry run knows the numbers.

    Returns:
        Received blocks on the device; sent and received numbers on the host.
    """
    if sent.device.type != "cuda":
        received = exchange.wait()
        both = torch.stack([sent[..., :num_columns], received[..., :num_columns]])
        return received, *arrived(both, purpose=purpose).tolist()
    done, stream = Event(sent.device), side_stream(sent.device, "read counts")
    with use_stream(stream):
        received = exchange.wait()
        both = torch.stack([sent[..., :num_columns], received[..., :num_columns]])
        with _pinned_like(both) as on_host:
            on_host.copy_(both, non_blocking=True)
            done.record(stream)
            # Also keeps `sent` and `both` alive for as long as the other stream reads them.
            done.synchronize()
            mine, theirs = arrived(on_host, purpose=purpose).tolist()
    done.wait()
    return received, mine, theirs


_SMALLEST = 1 << 14
_free_pinned: list[Tensor] = []
"""Pinned memory that is not in use; `append` and `pop` are atomic, so that threads share it."""


@contextmanager
def _pinned_like(source: Tensor) -> Iterator[Tensor]:
    """Yield pinned memory of the shape and dtype of `source`, to use within the context."""
    try:
        memory = _free_pinned.pop()
    except IndexError:
        memory = torch.empty(0, dtype=torch.uint8, device="cpu")
    if memory.numel() < source.nbytes:
        size = max(_SMALLEST, 1 << (source.nbytes - 1).bit_length())
        memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    yield memory[: source.nbytes].view(source.dtype).view(source.shape)
    _free_pinned.append(memory)  # not after an error: the device may yet write to it


def raise_on_all_ranks(
    error: Exception | None,
    mine: Header,
    verdicts: Sequence[Sequence[int]],
    *,
    groups: Sequence[ProcessGroup],
    device: torch.device,
) -> None:
    """Return on all ranks or raise on all ranks; see Note [All or none].

    Args:
        error: Error of this rank.
        mine: Header of this rank.
        verdicts: Verdict of each rank: code of its header, number of its invalid slots.
        groups: Group of these ranks; or two groups whose product they are: the verdicts of the
            second group follow each other for each rank of the first.
        device: Device of the exchange.
    """
    failed = [rank for rank, (code, bad) in enumerate(verdicts) if bad or code == FAILED.code]
    if failed:
        if device.type == "cpu":
            error = _own_or_peer_error(error, groups)
        raise error or _peer_error(failed[0] * groups[0].size() // len(verdicts), groups)
    place = 0
    for group in groups:
        place = place * group.size() + group.rank()
    raise_if_different(mine, [code for code, _ in verdicts], rank=place)


def _own_or_peer_error(error: Exception | None, groups: Sequence[ProcessGroup]) -> Exception | None:
    """Return the error of this rank, or else one that another rank of a group reports."""
    for group in groups:
        try:
            agree(error, group=group, where="the exchange of rows between experts")
        except Exception as agreed:  # noqa: BLE001 - may be this rank's own, of any type
            error = agreed
    return error


def _peer_error(place: int, groups: Sequence[ProcessGroup]) -> PeerError:
    """Return the error for a rank of the first group whose message cannot be exchanged."""
    rank = dist.get_process_group_ranks(groups[0])[place]
    where = f"rank {rank}" + (" or another one of its tp group" if len(groups) > 1 else "")
    return PeerError(f"{where} has wrong input for its experts", rank=rank)


def raise_if_different(mine: Header, codes: Sequence[int], *, rank: int) -> None:
    """Raise ValueError if headers differ; every rank finds one that differs from its own."""
    others = [other for other, code in enumerate(codes) if code != mine.code]
    if others:
        raise ValueError(
            f"rank {rank}: x ({mine}) must equal that of rank {others[0]} of the expert "
            f"group ({Header(codes[others[0]])})"
        )
