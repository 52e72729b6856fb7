"""Send and receive as parts of the autograd graph: gradients travel back by themselves.

Two modules on different ranks become one model: backward of what `send` returns waits for the
gradients of what was sent, and backward through what `receive` returned sends them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hp_vtp.messages import TensorMeta
from hp_vtp.transport import Transport

__all__ = [
    "receive",
    "send",
]


@dataclass(frozen=True, slots=True)
class _Transfer:
    """One transfer, and the metas of the tensors whose gradients come back."""

    transport: Transport
    source: int
    destination: int
    domain: int
    microbatch: int | None
    metas: tuple[TensorMeta, ...]

    @property
    def has_grad(self) -> list[bool]:
        edge = self.transport.layout.edge(self.source, self.destination, domain=self.domain)
        return [meta.is_leaf_on(edge) for meta in self.metas]

    @property
    def gradients(self) -> tuple[TensorMeta, ...]:
        return tuple(m for m, has in zip(self.metas, self.has_grad, strict=True) if has)


def send(
    transport: Transport,
    tensors: Sequence[Tensor],
    *,
    source: int,
    destination: int,
    domain: int = 0,
    metas: Sequence[TensorMeta] | None = None,
    microbatch: int | None = None,
) -> Tensor:
    """Send tensors to the next stage as part of the graph.

    Args:
        transport: Transport that has the edge.
        tensors: Same as for `Transport.send`.
        source: Logical stage of this rank.
        destination: Logical stage that receives.
        domain: Data-parallel pipeline.
        metas: Same as for `Transport.send`; of each floating-point tensor a gradient comes back.
        microbatch: Name of the microbatch for errors, compared with the other end's.

    Returns:
        A zero of shape () whose backward waits for the gradients of the tensors and goes on with
        them, whatever it is multiplied with or added to.

    Raises:
        ValueError: As `Transport.send`.
        TransferError: If the transport has failed.
    """
    transport.send(
        tensors,
        source=source,
        destination=destination,
        domain=domain,
        metas=metas,
        microbatch=microbatch,
    )
    if metas is None:
        metas = [TensorMeta(tuple(x.shape), x.dtype) for x in tensors]
    transfer = _Transfer(transport, source, destination, domain, microbatch, tuple(metas))
    result: Tensor = _Send.apply(transfer, *tensors)
    return result


def receive(
    transport: Transport,
    metas: Sequence[TensorMeta],
    *,
    source: int,
    destination: int,
    domain: int = 0,
    microbatch: int | None = None,
) -> tuple[Tensor, ...]:
    """Receive tensors from the stage before as part of the graph.

    Args:
        transport: Transport that has the edge.
        metas: Same as for `Transport.receive`; the gradient of each floating-point tensor is sent
            back.
        source: Logical stage that sends.
        destination: Logical stage of this rank.
        domain: Data-parallel pipeline.
        microbatch: Name of the microbatch for errors, compared with the other end's.

    Returns:
        This rank's parts. Backward through any of them sends the gradients of all.

    Raises:
        ValueError: As `Transport.receive`.
        TransferError: If the transfer fails.
    """
    transfer = _Transfer(transport, source, destination, domain, microbatch, tuple(metas))
    handle = transport.receive(
        metas, source=source, destination=destination, domain=domain, microbatch=microbatch
    )
    with torch.no_grad():
        values = handle.wait()
    # Something that requires grad has to go in for the outputs to have a graph.
    anchor = torch.zeros((), device=values[0].device if values else None, requires_grad=True)
    result: tuple[Tensor, ...] = _Receive.apply(transfer, anchor, *values)
    return result


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transfer: _Transfer, *tensors: Tensor) -> Tensor:
        ctx.transfer = transfer
        return tensors[0].new_zeros((), dtype=torch.promote_types(tensors[0].dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *_grads: object) -> object:
        transfer: _Transfer = ctx.transfer
        handle = transfer.transport.receive(
            transfer.gradients,
            source=transfer.destination,
            destination=transfer.source,
            domain=transfer.domain,
            microbatch=transfer.microbatch,
        )
        arrived = iter(handle.wait())
        return None, *(next(arrived) if has else None for has in transfer.has_grad)


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transfer: _Transfer, _anchor: Tensor, *values: Tensor) -> object:
        ctx.transfer = transfer
        fixed = [x for x, has in zip(values, transfer.has_grad, strict=True) if not has]
        ctx.mark_non_differentiable(*fixed)
        pairs = zip(values, transfer.has_grad, strict=True)
        return tuple(x.view_as(x) if has else x for x, has in pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> object:
        transfer: _Transfer = ctx.transfer
        transfer.transport.send(
            [grad for grad, has in zip(grads, transfer.has_grad, strict=True) if has],
            source=transfer.destination,
            destination=transfer.source,
            domain=transfer.domain,
            metas=transfer.gradients,
            microbatch=transfer.microbatch,
        )
        return None, None, *(None for _ in grads)
