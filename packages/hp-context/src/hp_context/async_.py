"""`AsyncContextParallel`: the exchanges of q, k and v run behind the projections that make them.

Shape symbols: B batch, N ranks, s local sequence, H heads, D head size.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hp_context.api import ContextParallel, M
from hp_context.batch import CONTIGUOUS, SequenceLayout
from hp_context.masks import Mask
from hp_context.methods.in_flight import (
    FREE,
    Exchange,
    Fallback,
    InFlight,
    OverlapCounts,
    OverlapRates,
    Tally,
    arrive,
    decline,
    default_rates,
    launch,
    take,
)
from hp_platform import outside_graph

Overlap = bool | Literal["auto"]


class AsyncContextParallel(ContextParallel):
    """`ContextParallel` that exchanges q, k and v while their projections are still computed.

    Forward: each exchange is launched as soon as its projection has computed, and runs behind the
    next one; attention waits for all. Backward: those of dv, dk, dq are launched together, in this
    order, and each is waited for right before its own projection goes backward. The numbers are
    those of `ContextParallel`, bit for bit.

    A launch counts only if the very tensor that was launched reaches attention, unwritten. A tensor
    that is made of it in between (rotary embeddings, a norm, a view) is exchanged synchronously
    instead; there, call `launch` after the last such operation, or name the last module. The first
    call with a shape is synchronous too: ranks compare shapes before they exchange data. `counts`
    tells what happened.

    The exchange of heads is hidden behind the projections. In the all-gather K/V and hybrid
    modes an `hp_context.Attention` also gathers its keys in strides of heads, each behind the
    attention of the one before, and sends their gradients home likewise. The ring mode overlaps by
    itself, here and in `ContextParallel`. In the all-gather K/V mode and in a ring without shared
    heads, projections launch nothing.

    Args:
        ulysses_degree: This and all others but the last two: see `ContextParallel`.
        ring: Send keys and values round a ring.
        seq_dim: Dimension of the sequence.
        head_dim: Dimension of the heads.
        qkv_indices: Positions of q, k, v.
        qkv_kwarg_names: Names of q, k, v.
        mask: Description of the keys that a query may see.
        mask_kwarg_name: Parameter of the core attention for a mask.
        layout: Positions that each rank has.
        load_balance: Short for `layout=HeadTail()`.
        overlap: True: launch always, and gather keys in four strides or as many as there are
            key/value heads. False: never, as `ContextParallel`. "auto": where, and in as many
            strides as, `rates` say that it pays.
        rates: Rates of link and compute, the same on every rank. None: default rates of the kind of
            device.

    Raises:
        ValueError: Arguments contradict each other.

    Example:
        >>> parallel = AsyncContextParallel()
        >>> parallel.apply(core, group, q_proj, k_proj, v_proj)  # doctest: +SKIP
    """

    def __init__(
        self,
        ulysses_degree: int | None = None,
        *,
        ring: bool = False,
        seq_dim: int = 1,
        head_dim: int = 2,
        qkv_indices: Sequence[int] = (0, 1, 2),
        qkv_kwarg_names: Sequence[str] = (),
        mask: Mask | None = None,
        mask_kwarg_name: str = "attn_mask",
        layout: SequenceLayout = CONTIGUOUS,
        load_balance: bool = False,
        overlap: Overlap = "auto",
        rates: OverlapRates | None = None,
    ) -> None:
        super().__init__(
            ulysses_degree,
            ring=ring,
            seq_dim=seq_dim,
            head_dim=head_dim,
            qkv_indices=qkv_indices,
            qkv_kwarg_names=qkv_kwarg_names,
            mask=mask,
            mask_kwarg_name=mask_kwarg_name,
            layout=layout,
            load_balance=load_balance,
        )
        if overlap not in (True, False, "auto"):
            raise ValueError(f"overlap ({overlap!r}) must be True, False or 'auto'")
        self.overlap = overlap
        self.rates = rates
        self._tally = Tally()
        # Of a tensor of a group, shape and dtype, once ranks have agreed on it.
        self._known: dict[tuple[object, ...], Exchange] = {}

    @property
    def counts(self) -> OverlapCounts:
        """Return how many exchanges overlapped, and how many did not for which reason."""
        return self._tally.read()

    def apply(
        self,
        module: M,
        mesh_or_group: DeviceMesh | ProcessGroup,
        q_proj: nn.Module | None = None,
        k_proj: nn.Module | None = None,
        v_proj: nn.Module | None = None,
    ) -> M:
        """Hook the exchanges around a core attention and behind the modules that make q, k, v.

        Args:
            module: See `ContextParallel.apply`.
            mesh_or_group: See `ContextParallel.apply`.
            q_proj: The last module on the way to q: returns the tensor that `module` gets as q,
                or a tuple that begins with it. None: q is not launched, or by `launch`.
            k_proj: The same for k.
            v_proj: The same for v.

        Returns:
            `module`.

        Raises:
            ValueError: See `ContextParallel.apply`.
        """
        super().apply(module, mesh_or_group)
        group = self._resolve(mesh_or_group)

        def after(_: nn.Module, args: tuple[object, ...], output: object) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if isinstance(first, Tensor):
                self.launch(first, group, flops=_matmul_flops(args, first))

        for projection in {id(p): p for p in (q_proj, k_proj, v_proj) if p is not None}.values():
            projection.register_forward_hook(after)
        return module

    @outside_graph
    def launch(
        self, x: Tensor, mesh_or_group: DeviceMesh | ProcessGroup, *, flops: float = math.inf
    ) -> Tensor:
        """Start the exchange of a q, k or v that is computed after the projections.

        Pass the returned tensor itself to attention. Backward hides most if each of the three is
        launched before the next is computed: `launch(rope(q_proj(x)))`, then k, then v.

        Args:
            x: [B, s, H, D], or as `seq_dim` and `head_dim` say.
            mesh_or_group: Mesh or group of the attention that will take it, as passed to `apply`.
            flops: Floating-point operations of the computation behind which it may hide, for
                `overlap="auto"`.

        Returns:
            `x`.
        """
        group = self._axes(self._resolve(mesh_or_group)).inner
        if self.overlap is not False and group is not None:
            reason = self._launch(x, group, flops)
            if reason is None:
                self._tally.launched()
            else:
                decline(x, reason)
        return x

    def _launch(self, x: Tensor, group: ProcessGroup, flops: float) -> Fallback | None:
        """Launch `x`, or return the reason not to, which is the same on all ranks."""
        if x.is_inference():
            return Fallback.INFERENCE
        exchange = self._known.get(_key(x, group))
        if exchange is None:
            return Fallback.FIRST_CALL
        if self.overlap == "auto":
            rates = self.rates or default_rates(x.device.type)
            if not rates.pays(exchange.num_bytes(x), flops):
                return Fallback.COST
        launch(x, exchange)
        return None

    def _exchange(self, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup) -> list[Tensor]:
        """Take the exchanges in flight and exchange the rest, as `ContextParallel` does."""
        if self.overlap is False:
            return super()._exchange(q, k, v, group)
        pairs = list(zip((q, k, v), self._exchanges(q, k, group), strict=True))
        for x, exchange in pairs:
            self._known[_key(x, group)] = exchange
        records = [take(x, exchange) for x, exchange in pairs]
        for record in records:
            self._tally.arrived(None if isinstance(record, InFlight) else record)
        # Those in flight stay there while the others are exchanged.
        results = [
            exchange(x) if isinstance(record, Fallback) else x
            for (x, exchange), record in zip(pairs, records, strict=True)
        ]
        arrived = iter(arrive([record for record in records if isinstance(record, InFlight)]))
        return [
            next(arrived) if isinstance(record, InFlight) else result
            for record, result in zip(records, results, strict=True)
        ]

    def _rates(self, device_type: str) -> OverlapRates | None:
        if self.overlap is False:
            return None
        return FREE if self.overlap is True else self.rates or default_rates(device_type)


def _key(x: Tensor, group: ProcessGroup) -> tuple[torch.Size, object, object]:
    return x.shape, x.dtype, group.group_name


def _matmul_flops(args: tuple[object, ...], output: Tensor) -> float:
    """Return the operations of a matrix product that made `output` of the first argument."""
    match args:
        case (Tensor() as first, *_) if first.ndim:
            return 2.0 * output.numel() * first.size(-1)
    return math.inf
