"""How many slots each expert has, on the device and on the host.

Shape symbols: T tokens, K experts per token, E experts, W ranks, B numbers told to a rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hp_platform import Event, Pending, side_stream, use_stream
from hp_platform.host_reads import arrived


class SlotCounts(NamedTuple):
    """Where slots go, and how many go there.

    Attributes:
        keys: Expert of each slot; E where it was dropped (-1), E + 1 where there is no such expert.
            Of the narrowest dtype that holds it, which sorts fastest: [T, K].
        experts: The same, int64 [T, K].
        counts: Slots of each key, int64 [E + 2].
    """

    keys: Tensor
    experts: Tensor
    counts: Tensor


def count_slots(experts_TK: Tensor, num_experts: int) -> SlotCounts:
    """Count the slots of each expert, those of none, and those of experts that do not exist."""
    experts_TK = experts_TK.contiguous()  # or what is made of it would have its strides
    exists = (experts_TK >= 0) & (experts_TK < num_experts)
    bucket_TK = experts_TK.to(torch.int64).where(exists, num_experts + 1)
    bucket_TK = bucket_TK.masked_fill_(experts_TK == -1, num_experts)
    counts = bucket_TK.new_zeros(num_experts + 2)
    bucket_S = bucket_TK.view(-1)
    counts.scatter_add_(0, bucket_S, torch.ones_like(bucket_S))
    return SlotCounts(narrowed(bucket_TK, num_experts + 2), bucket_TK, counts)


def narrowed(keys: Tensor, num_keys: int) -> Tensor:
    """Cast keys 0 .. num_keys - 1 to a dtype that sorts fast."""
    for dtype in (torch.uint8, torch.int16):
        if num_keys <= torch.iinfo(dtype).max:
            return keys.to(dtype)
    return keys.to(torch.int32)


def invalid_experts(num_invalid: int, num_experts: int) -> ValueError:
    """Say that slots have experts that do not exist."""
    return ValueError(
        f"experts must be in [0, num_experts ({num_experts})), or -1 for none, but {num_invalid} "
        "are not"
    )


def read_host(numbers: Tensor) -> list[Any]:
    """Wait for the device and read numbers."""
    values: list[Any] = numbers.tolist()
    return values


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
        return heard, *read_host(arrived(both, purpose=purpose))
    done, stream = Event(told.device), side_stream(told.device, "read counts")
    with use_stream(stream):
        heard = exchange.wait()
        both = torch.stack([told[..., :num_columns], heard[..., :num_columns]])
        with _landings.lend(both) as on_host:
            on_host.copy_(both, non_blocking=True)
            done.record(stream)
            # Also keeps `told` and `both` alive for as long as the other stream reads them.
            done.synchronize()
            mine, theirs = read_host(arrived(on_host, purpose=purpose))
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
