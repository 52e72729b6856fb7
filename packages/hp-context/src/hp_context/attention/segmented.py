"""Attention in calls of variable lengths, for all sequences at once; see `softmax` for blocks.

Where a kernel of variable lengths applies and the mask is known to it (`masks.segments`), the keys
that are there are one call: for every document, run of positions and sequence of the batch. The
results of several parts of the keys are put together by their log-sum-exp, as those of blocks are,
and gradients follow from the final output and log-sum-exp: see Note [Backward by blocks].

Shape symbols: B batch, s queries of a sequence, T = B * s, K keys of a sequence, U keys of all
sequences, H query heads, G key/value heads (G divides H), D head size of queries and keys, E head
size of values.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hp_context.attention.softmax import sinks_gradient, with_sinks
from hp_context.kernels import varlen
from hp_context.kernels.varlen import Lengths, padded
from hp_context.masks import Mask, of_sequences
from hp_context.masks.segments import Call, calls, is_known
from hp_platform.dry_device import device_number

MOST_NUMBERS = 1 << 22  # of calls that are kept on devices: 16 MiB


def masks_of_calls(q: Tensor, v: Tensor, mask: Mask) -> tuple[Mask, ...] | None:
    """Return the mask of each sequence if calls of variable lengths can compute attention.

    The answer is the same on all ranks that share a sequence.

    Args:
        q: [B, H, s, D].
        v: [B, G, s, E].
        mask: For all sequences, or with one for each.

    Returns:
        None where the kernel does not take such tensors, or does not know such a mask.
    """
    if q.ndim != 4 or not varlen.applies(q, v):
        return None
    masks = of_sequences(mask, q.size(0))
    return masks if all(map(is_known, masks if mask.of_batch else masks[:1])) else None


class _Round(NamedTuple):
    """Keys of a call and the rows that they are."""

    keys: slice | Tensor
    rows: Tensor


class _OnDevice(NamedTuple):
    """A call as its kernel and its copies take it.

    Attributes:
        lengths: The segments.
        keys: Rows of its keys, int32; None if they are a view.
        rounds: Where gradients are added.
    """

    lengths: Lengths
    keys: Tensor | None
    rounds: tuple[_Round, ...]


class _Copies:
    """The calls that are on devices; the oldest go when there are many numbers."""

    def __init__(self) -> None:
        self._known: dict[tuple[Call, torch.device, int, int], _OnDevice] = {}
        self._lock = Lock()
        self._total = 0

    def get(self, call: Call, device: torch.device) -> _OnDevice:
        """Return a call on a device.

        What a call is told of its segments are numbers that follow from the mask and from
        positions. They are worked out on the host, remembered with the plan, and copied to the
        device through pinned memory, which nobody waits for: once for all layers, forward and
        backward. Another stream gets a copy of its own, since it does not wait for the first. Plans
        of microbatches that are done go when there are too many.
        """
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = (call, device, device_number(), stream)
        found = self._known.get(key)
        if found is None:
            found = _copied(call, device)
            with self._lock:
                self._total += 0 if key in self._known else call.num_numbers
                self._known[key] = found
                while self._total > MOST_NUMBERS and len(self._known) > 1:
                    oldest = next(iter(self._known))
                    del self._known[oldest]
                    self._total -= oldest[0].num_numbers
        return found


_copies = _Copies()


def _copied(call: Call, device: torch.device) -> _OnDevice:
    numbers = [torch.tensor(call.starts), torch.tensor(call.key_starts)]
    if not call.is_view:
        numbers.append(_rows(call.keys))
        for each in call.rounds:
            if len(call.rounds) > 1:
                numbers.append(_rows([keys for keys, _ in each]))
            numbers.append(_rows([rows for _, rows in each]))
    host = torch.cat(numbers).to(torch.int32)
    if device.type == "cuda":
        pinned = torch.empty(host.shape, dtype=host.dtype, device="cpu", pin_memory=True)
        host = pinned.copy_(host).to(device, non_blocking=True)
    starts, key_starts, *others = host.split([len(x) for x in numbers])
    lengths = Lengths(starts, key_starts, call.longest, call.window)
    if call.is_view:
        return _OnDevice(lengths, None, ())
    keys, *by_round = others
    if len(call.rounds) == 1:
        return _OnDevice(lengths, keys, (_Round(slice(None), by_round[0]),))
    rounds = []
    for each, (picked, rows) in zip(
        call.rounds, zip(by_round[::2], by_round[1::2], strict=True), strict=True
    ):
        at = [keys for keys, _ in each]
        follow = all(a.stop == b.start for a, b in pairwise(at))
        rounds.append(_Round(slice(at[0].start, at[-1].stop) if follow else picked, rows))
    return _OnDevice(lengths, keys, tuple(rounds))


def _rows(runs: Iterable[range]) -> Tensor:
    return torch.cat([torch.arange(run.start, run.stop, run.step) for run in runs])


def rows_of_queries(x: Tensor) -> Tensor:
    """Return [B * s, H, D] of [B, H, s, D], a view where sequences follow each other in memory."""
    rows: Tensor = x.transpose(1, 2).flatten(0, 1)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def heads_first(rows: Tensor, batch: int) -> Tensor:
    """Return a view [B, H, s, D] of [B * s, H, D]."""
    heads: Tensor = rows.unflatten(0, (batch, -1)).transpose(1, 2)
    return heads


def _keys_of(call: Call, placed: _OnDevice, *tensors: Tensor) -> tuple[Tensor, ...]:
    if placed.keys is None:
        run = call.keys[0]
        return tuple(x[run.start : run.stop] for x in tensors)
    return tuple(x.index_select(0, placed.keys) for x in tensors)


class Forward:
    """Attention over the keys that have been added so far.

    Args:
        q: [T, H, D].
        scale: Factor of the scores.
    """

    def __init__(self, q: Tensor, scale: float) -> None:
        self.q, self._scale = q, scale
        self._wide = torch.promote_types(q.dtype, torch.float32)
        self._out: Tensor | None = None
        self._lse = torch.empty(0)

    def add_keys(self, keys: Sequence[Tensor], planned: Iterable[Call]) -> None:
        """Add keys.

        Args:
            keys: Keys [U, G, D] and values [U, G, E]; or both, packed, [U, G, D + E].
            planned: The calls that compute them.
        """
        for call in planned:
            placed = _copies.get(call, self.q.device)
            k, v = _split(_keys_of(call, placed, *keys), self.q.size(-1))
            queries = self.q[call.queries.start : call.queries.stop]
            out, lse = varlen.forward(queries, k, v, lengths=placed.lengths, scale=self._scale)
            if call.has_gaps:  # Note [Segments without queries or keys]
                lse.nan_to_num_(nan=torch.nan, posinf=-torch.inf, neginf=-torch.inf)
            self._merge(call, out, lse)

    def _merge(self, call: Call, out: Tensor, lse: Tensor) -> None:
        num_rows, rows = self.q.size(0), slice(call.queries.start, call.queries.stop)
        if self._out is None and len(call.queries) == num_rows:
            self._out, self._lse = out, lse
            return
        if self._out is None:
            self._out = torch.zeros_like(self.q, dtype=self._wide)
            self._lse = lse.new_full((lse.size(0), num_rows), -torch.inf)
        self._out = self._out.to(self._wide)
        before = self._lse[:, rows]
        weight = (lse - before).sigmoid_()
        if call.has_gaps:
            weight.nan_to_num_(0.0)  # of queries that have seen nothing yet
        self._out[rows].lerp_(out.to(self._wide), weight.t().unsqueeze(-1).to(self._wide))
        self._lse[:, rows] = torch.logaddexp(before, lse)

    def result(self, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the output [T, H, D], padded, in the dtype of q, and the log-sum-exp [H, T].

        Queries that see nothing at all have output 0 and log-sum-exp -inf.

        Args:
            sinks: [H], see `softmax.with_sinks`.
        """
        out, lse = self._out, self._lse
        if out is None:
            out = torch.zeros_like(self.q)
            lse = out.new_full((self.q.size(1), self.q.size(0)), -torch.inf, dtype=self._wide)
        if sinks is not None:
            by_row, total = with_sinks(out.transpose(0, 1)[None], lse[None], sinks)
            out, lse = by_row[0].transpose(0, 1), total[0]
        return out.to(self.q.dtype), lse


class Backward:
    """Gradients over the keys that have been added so far; see Note [Backward by blocks].

    Args:
        q: [T, H, D].
        out: [T, H, D], padded, over all keys, with sinks if there are any.
        lse: [H, T], likewise.
        grad_out: [T, H, D], padded.
        scale: Factor of the scores.
    """

    def __init__(
        self,
        q: Tensor,
        *,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        scale: float,
    ) -> None:
        self.q, self._out, self._lse, self._grad_out = q, out, lse, grad_out
        self._scale = scale
        self._dq: Tensor | None = None

    @property
    def dq(self) -> Tensor:
        """Return the gradient of q [T, H, D], in the dtype of q or wider."""
        return torch.zeros_like(self.q) if self._dq is None else self._dq

    def add_keys(
        self, keys: Sequence[Tensor], planned: Sequence[Call], grads: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, ...]:
        """Add keys and return their gradients, shaped as they are.

        Args:
            keys: See `Forward.add_keys`.
            planned: See `Forward.add_keys`.
            grads: Memory for them, in float32 or wider, overwritten; None: new memory, in the
                dtype of the keys where one call computes them.
        """
        first_has_all = any(
            call.is_view and len(call.keys[0]) == keys[0].size(0) for call in planned[:1]
        )
        if grads is None:
            if first_has_all and len(planned) == 1:
                return self._call(planned[0], keys)
            wide = torch.promote_types(self.q.dtype, torch.float32)
            grads = tuple(torch.empty_like(x, dtype=wide) for x in keys)
        if not first_has_all:
            for grad in grads:
                grad.zero_()
        for number, call in enumerate(planned):
            overwrite = first_has_all and number == 0
            self._add_to(grads, call, self._call(call, keys), overwrite=overwrite)
        return grads

    def _call(self, call: Call, keys: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        placed = _copies.get(call, self.q.device)
        rows = slice(call.queries.start, call.queries.stop)
        k, v = _split(_keys_of(call, placed, *keys), self.q.size(-1))
        dq, dk, dv = varlen.backward(
            self.q[rows],
            k,
            v,
            grad_out=self._grad_out[rows],
            out=self._out[rows],
            lse=self._lse[:, rows].contiguous(),
            lengths=placed.lengths,
            scale=self._scale,
        )
        self._add_dq(call, dq)
        return dk, dv

    def _add_dq(self, call: Call, dq: Tensor) -> None:
        if self._dq is None and len(call.queries) == self.q.size(0):
            self._dq = dq
            return
        wide = torch.promote_types(dq.dtype, torch.float32)
        if self._dq is None:
            self._dq = torch.zeros_like(self.q, dtype=wide)
        self._dq = self._dq.to(wide)
        self._dq[call.queries.start : call.queries.stop] += dq

    @staticmethod
    def _add_to(
        grads: tuple[Tensor, ...], call: Call, parts: tuple[Tensor, Tensor], *, overwrite: bool
    ) -> None:
        placed = _copies.get(call, parts[0].device)
        if placed.keys is None:
            run = call.keys[0]
            rows = tuple(grad[run.start : run.stop] for grad in grads)
            for grad, part in zip(_split(rows, parts[0].size(-1)), parts, strict=True):
                _ = grad.copy_(part) if overwrite else grad.add_(part)
            return
        for grad, packed in zip(grads, _packed_like(grads, parts), strict=True):
            for keys, at in placed.rounds:
                of_round = packed[keys] if isinstance(keys, slice) else packed.index_select(0, keys)
                grad.index_add_(0, at, of_round)


def _split(keys: tuple[Tensor, ...], head_size: int) -> tuple[Tensor, Tensor]:
    """Return keys and values, which may be packed."""
    if len(keys) == 2:
        return keys[0], keys[1]
    k, v = keys[0].tensor_split([head_size], -1)
    return k, v


def _packed_like(grads: tuple[Tensor, ...], parts: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return gradients of keys and values in the dtype of `grads`, packed if these are."""
    dtype = grads[0].dtype
    if len(grads) == 2:
        return tuple(part.to(dtype) for part in parts)
    dk, dv = parts
    both = dk.new_empty((*dk.shape[:-1], dk.size(-1) + dv.size(-1)), dtype=dtype)
    for target, part in zip(both.tensor_split([dk.size(-1)], -1), parts, strict=True):
        target.copy_(part)
    return (both,)


def attend_whole(
    qkv: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
    *,
    masks: tuple[Mask, ...],
    scale: float,
) -> Tensor:
    """Return attention of whole sequences, [B, H, S, E]; differentiable once.

    Args:
        qkv: [B, H, S, D], [B, G, S, D] and [B, G, S, E].
        sinks: [H], see `softmax.with_sinks`.
        masks: One for each sequence.
        scale: Factor of the scores.
    """
    q, _, v = qkv
    whole = (range(q.size(2)),)
    planned = calls(masks, whole, whole, alternate=False)
    out: Tensor = _Whole.apply(planned, scale, *map(rows_of_queries, qkv), sinks)
    return heads_first(out[..., : v.size(-1)], q.size(0))


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, planned: tuple[Call, ...], scale: float, *inputs: Tensor) -> Tensor:
        q, k, v, sinks = inputs
        with torch.autocast(q.device.type, enabled=False):
            ctx.value_size, v = v.size(-1), padded(v, q.size(-1))
            attention = Forward(q, scale)
            attention.add_keys((k, v), planned)
            out, lse = attention.result(sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.planned, ctx.scale = planned, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            gradients = Backward(q, out=out, lse=lse, grad_out=grad_out, scale=ctx.scale)
            dk, dv = gradients.add_keys((k, v), ctx.planned, None)
            dsinks = None
            if ctx.needs_input_grad[5]:
                grad_heads, out_heads = (x.transpose(0, 1)[None] for x in (grad_out, out))
                dsinks = sinks_gradient(sinks, grad_out=grad_heads, out=out_heads, lse=lse[None])
        dq = gradients.dq.to(q.dtype)
        return None, None, dq, dk.to(k.dtype), dv.to(v.dtype)[..., : ctx.value_size], dsinks
