"""Exchanges in flight: their records, which ride on tensors, the rates that decide, and counters.

The record of an exchange rides on the tensor it was launched from: not on a module and not on the
object that applies context parallelism, which several microbatches, threads and recomputations
share. Attention takes the record if the tensor is still the one that was launched, unwritten;
otherwise it exchanges the tensor that it was given.

The record is the only owner of a forward exchange and the graph the only owner of a backward one,
and no record refers back to its tensor. If attention is not reached, because of an exception or a
recomputation that stops early, the record goes with the tensor; the buffers then live until the
operation has completed (`hp_platform.Pending`), and no longer. No edge is a view of the tensor: a
view would keep its base alive, and the base the record. (Only a leaf that requires grad is held by
its edge, for autograd to reach its `grad`, until attention takes it.)

Shape symbols: N ranks, S whole sequence, s = S / N, H heads of a tensor, h heads sent to each rank.
"""

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from hp_context.batch import CONTIGUOUS, SequenceLayout
from hp_context.checks import Dims
from hp_context.methods.ulysses import Packing, seq_to_head
from hp_platform import Pending, launch_all_to_all


class Fallback(StrEnum):
    """The reason why a q, k or v was exchanged synchronously."""

    FIRST_CALL = "first call with this shape"  # ranks compare shapes before anything is launched
    COST = "does not pay"  # overlap="auto" and `OverlapRates.pays` says no
    REPLACED = "another tensor"  # never launched: made after the projection, or by recompute
    WRITTEN = "written in place"
    TAKEN = "taken before"  # by an earlier attention, such as the one that is recomputed
    REDIRECTED = "gradient cut or begun"  # requires_grad changed since the launch
    OTHER = "launched for another exchange"  # another group, layout or number of query heads
    INFERENCE = "inference tensor"  # does not tell of writes in place


@dataclass(frozen=True, slots=True)
class OverlapRates:
    """Rates by which `overlap="auto"` decides; the same on all ranks, or they would hang.

    While an exchange of b bytes runs behind a projection of f floating-point operations, at most
    `min(b / link, f / compute)` seconds of it are hidden. Overlap pays if that is more than
    `overhead`, which stands for the launch, the wait, and the compute units that the exchange
    takes away.

    Attributes:
        link: Bytes per second that a rank sends to the others.
        compute: Floating-point operations per second of the projections and of attention.
        overhead: Seconds.
    """

    link: float
    compute: float
    overhead: float

    def __post_init__(self) -> None:
        for name in ("link", "compute"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be > 0")
        if self.overhead < 0:
            raise ValueError(f"overhead ({self.overhead}) must be >= 0")

    def pays(self, num_bytes: float, flops: float) -> bool:
        """Tell whether launching an exchange early gains more than it costs.

        Args:
            num_bytes: Bytes that this rank sends to others.
            flops: Floating-point operations of the projection behind which it may hide.
        """
        return min(num_bytes / self.link, flops / self.compute) > self.overhead

    def strides(self, num_bytes: float, flops: float, most: int) -> int:
        """Return the best number of strides in which keys are gathered, 1 to `most`.

        Of n strides each but the first is gathered while the one before it is computed, and each
        costs `overhead`.

        Args:
            num_bytes: Bytes that a rank sends to others, all strides together.
            flops: Floating-point operations of its attention.
            most: Strides at most.
        """
        transfer, compute = num_bytes / self.link, flops / self.compute

        def seconds(n: int) -> float:
            return (transfer + compute + (n - 1) * max(transfer, compute)) / n + n * self.overhead

        return min(range(1, most + 1), key=seconds)


# Orders of magnitude of one machine of its kind; measure and pass your own.
_DEFAULT_RATES = {
    "cpu": OverlapRates(link=1e9, compute=5e10, overhead=3e-4),
    "cuda": OverlapRates(link=5e10, compute=4e14, overhead=5e-5),
}


# Where overlap is asked for whatever it costs.
FREE = OverlapRates(link=1.0, compute=1.0, overhead=0.0)


def default_rates(device_type: str) -> OverlapRates:
    """Return rates of a kind of device; those of CUDA for kinds that are not known."""
    return _DEFAULT_RATES.get(device_type, _DEFAULT_RATES["cuda"])


@dataclass(frozen=True, slots=True)
class OverlapCounts:
    """Exchanges of q, k and v in forward up to a moment, recomputation included.

    Attributes:
        launched: Exchanges that were started where the tensor was made.
        overlapped: Launched exchanges whose result an attention took.
        fallbacks: Number of synchronous exchanges, by reason.
    """

    launched: int = 0
    overlapped: int = 0
    fallbacks: Mapping[Fallback, int] = field(default_factory=lambda: MappingProxyType({}))


class Tally:
    """Counters that several threads may use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._launched = 0
        self._arrived: Counter[Fallback | None] = Counter()

    def launched(self) -> None:
        """Count one launch."""
        with self._lock:
            self._launched += 1

    def arrived(self, reason: Fallback | None) -> None:
        """Count one exchange that reached attention: overlapped, or not for a reason."""
        with self._lock:
            self._arrived[reason] += 1

    def read(self) -> OverlapCounts:
        """Return the counts of now."""
        with self._lock:
            fallbacks = {reason: n for reason, n in self._arrived.items() if reason is not None}
            return OverlapCounts(self._launched, self._arrived[None], MappingProxyType(fallbacks))


if TYPE_CHECKING:
    from hp_context.methods.placement import Placed

_RECORD = "_hp_context_record"
_CALL = "_hp_context_call"


@dataclass(frozen=True, slots=True)
class Exchange:
    """One `seq_to_head`: [s, H, ...] for [S, h, ...], the dims where `dims` says."""

    group: ProcessGroup
    dims: Dims
    head_index: tuple[int, ...] | None
    head_counts: tuple[int, ...] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Exchange synchronously. Differentiable."""
        return seq_to_head(
            x,
            group=self.group,
            seq_dim=self.dims.seq,
            head_dim=self.dims.head,
            head_index=self.head_index,
            head_counts=self.head_counts,
        )

    def num_bytes(self, x: Tensor) -> float:
        """Return the bytes of `x` that a rank sends to others; the same on all ranks."""
        heads = x.size(self.dims.head)
        sent = heads if self.head_index is None else len(self.head_index)
        others = (self.group.size() - 1) / self.group.size()
        return x.numel() * x.element_size() * sent / heads * others

    def launch(self, x: Tensor) -> Pending[Tensor]:
        """Start the exchange outside autograd; `arrived` makes sense of the result."""
        sent, received = self._packing.splits(x.shape, self.group.rank())
        packed = self._packing.pack(x)
        return launch_all_to_all(
            packed, input_splits=sent, output_splits=received, group=self.group
        )

    def arrived(self, received: Tensor, shape: torch.Size) -> Tensor:
        """Return all positions with this rank's heads, from a tensor of [s, H, ...] (`shape`)."""
        return self._packing.arrived(received, shape, self.group.rank(), self.dims.seq)

    def launch_back(self, grad: Tensor, shape: torch.Size) -> Pending[Tensor]:
        """Start to send back the gradient of the tensor that `arrived` returned."""
        parts = grad.unflatten(self.dims.seq, (self.group.size(), -1)).movedim(self.dims.seq, 0)
        received, sent = self._packing.splits(shape, self.group.rank())
        if sent is not None:
            parts = parts.reshape(-1)
        return launch_all_to_all(parts, input_splits=sent, output_splits=received, group=self.group)

    def arrived_back(self, received: Tensor, shape: torch.Size) -> Tensor:
        """Return the gradient of the argument of `launch`, [s, H, ...] (`shape`)."""
        return self._packing.summed(received, shape)

    @property
    def _packing(self) -> Packing:
        size = self.group.size()
        return Packing(size, self.dims.head, self.head_index, self.head_counts)


class InFlight:
    """A launched exchange that no attention has taken yet."""

    __slots__ = ("back", "edge", "exchange", "pending", "requires_grad", "shape", "version")

    def __init__(self, x: Tensor, exchange: Exchange) -> None:
        self.exchange = exchange
        self.version = x._version  # noqa: SLF001  # torch has no public spelling
        self.requires_grad, self.shape = x.requires_grad, x.shape
        self.back = _Back()
        self.pending: Pending[Tensor] = exchange.launch(x.detach())
        self.edge: Tensor = _Launch.apply(x, exchange, self.back)


def launch(x: Tensor, exchange: Exchange) -> None:
    """Start the exchange of `x` and leave the record of it on `x`."""
    x.__dict__[_RECORD] = InFlight(x, exchange)


def decline(x: Tensor, reason: Fallback) -> None:
    """Leave on `x` the reason why its exchange was not launched."""
    x.__dict__[_RECORD] = reason


def take(x: Tensor, exchange: Exchange) -> InFlight | Fallback:
    """Return the record of `x` if it is of this exchange and of `x` as it is now.

    A record is handed out once. One that does not fit is waited for and dropped.
    """
    record = x.__dict__.pop(_RECORD, Fallback.REPLACED)
    if not isinstance(record, InFlight):
        return Fallback(record)
    x.__dict__[_RECORD] = Fallback.TAKEN
    reason = _misfit(x, record, exchange)
    if reason is None:
        return record
    record.pending.wait()
    return reason


def arrive(records: list[InFlight]) -> list[Tensor]:
    """Wait for the exchanges and return their results. Differentiable.

    Autograd sees

        q, k, v  --_Launch, one each-->  edges of no elements  --_Arrive, one for all-->  q', k', v'

    In backward `_Arrive` launches the exchanges of dv', dk', dq' in this order, and each `_Launch`
    waits for its own and returns it as one more gradient of q, k or v, added to those of other
    consumers. Of the nodes that are ready autograd runs the youngest first. Hence `_Launch` must be
    made right after its projection: then the order is wait dv, backward of v's projection, wait dk,
    ... with dk and dq on their way meanwhile. Were it made before attention, all three waits would
    come first; with a launch in each node in place of `_Arrive`, each wait would follow its launch
    at once.
    """
    if not records:
        return []
    return list(_Arrive.apply(records, *(record.edge for record in records)))


def _misfit(x: Tensor, record: InFlight, exchange: Exchange) -> Fallback | None:
    if record.version != x._version:  # noqa: SLF001
        return Fallback.WRITTEN
    if record.requires_grad != x.requires_grad:
        return Fallback.REDIRECTED
    return None if record.exchange == exchange else Fallback.OTHER


@dataclass(slots=True)
class _Back:
    """The way back of one exchange: filled by `_Arrive`, emptied by `_Launch`, in each backward.

    What a backward that wanted only some of the gradients left here goes with the next one, or with
    the graph.
    """

    pending: Pending[Tensor] | None = None


class _Launch(torch.autograd.Function):
    """The exchange itself is launched beside it, also where there is nothing to differentiate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, back: _Back) -> Tensor:
        ctx.exchange, ctx.back, ctx.shape = exchange, back, x.shape
        ctx.set_materialize_grads(False)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor | None) -> tuple[Tensor | None, None, None]:
        pending, ctx.back.pending = ctx.back.pending, None
        if token is None or pending is None:
            return None, None, None
        return ctx.exchange.arrived_back(pending.wait(), ctx.shape), None, None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, records: list[InFlight], *_: Tensor) -> tuple[Tensor, ...]:
        ctx.ways = [(record.exchange, record.back, record.shape) for record in records]
        ctx.set_materialize_grads(False)
        return tuple(
            record.exchange.arrived(record.pending.wait(), record.shape) for record in records
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tokens: list[Tensor | None] = [None] * len(grads)
        for i, (exchange, back, shape) in reversed(list(enumerate(ctx.ways))):
            grad = grads[i]
            if grad is not None and ctx.needs_input_grad[1 + i]:
                back.pending = exchange.launch_back(grad, shape)
                tokens[i] = grad.new_empty(0)
        return None, *tokens


@dataclass(frozen=True, slots=True)
class Call:
    """The record of a call, from the exchange before the core attention for the one after it.

    It rides on the q that the core attention gets, which belongs to this call alone: not on the
    module and not on the object that applies context parallelism, which microbatches and threads
    share.

    Attributes:
        head_counts: Query heads of each rank; None: as many each.
        placed: Placement of q as a DTensor; None: it was a plain tensor.
        layout: Positions that each rank has.
    """

    head_counts: tuple[int, ...] | None = None
    placed: "Placed | None" = None
    layout: SequenceLayout = CONTIGUOUS


def parts_of_rank(qkv: list[Tensor], dims: Dims) -> "tuple[list[Tensor], Placed | None]":
    """Return this rank's parts of q, k, v; and the placement of the whole, if they are DTensors.

    Raises:
        ValueError: See `placement.local_parts`.
    """
    if not any(hasattr(x, "placements") for x in qkv):
        return qkv, None
    from hp_context.methods.placement import local_parts  # noqa: PLC0415  # takes seconds

    return local_parts(qkv, seq_dim=dims.seq, head_dim=dims.head)


def remember(q: Tensor, call: Call) -> None:
    """Leave `call` on the q of the core attention."""
    q.__dict__[_CALL] = call


def recall(q: Tensor) -> Call | None:
    """Return the record that `remember` left on `q`."""
    call: Call | None = q.__dict__.get(_CALL)
    return call
