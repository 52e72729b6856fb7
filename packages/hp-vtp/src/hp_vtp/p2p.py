"""The four functions by which users of MindSpeed-MM's VTP know point-to-point communication.

They are thin: `hp_vtp.transport` does the work. Unlike MindSpeed-MM's, every rank of a stage calls
them, not its leader alone; handles need not be kept; and nothing is averaged over peers.

A rank computes one logical stage, or several where the chain comes back. `is_end_stage` says which
of them the call is about: the last one, as at the end of a U-shape, or the first.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, Protocol, TypedDict, Unpack, overload

import torch
from torch import Tensor

from hp_vtp.messages import TensorMeta
from hp_vtp.transport import Transport
from hp_vtp.transport.handles import Handle

__all__ = [
    "P2POptions",
    "Received",
    "Timer",
    "Timers",
    "logical_stage",
    "vtp_recv_backward",
    "vtp_recv_forward",
    "vtp_send_backward",
    "vtp_send_forward",
]


class Timer(Protocol):
    """Counts the time between `start` and `stop`."""

    def start(self) -> None:
        """Start counting."""

    def stop(self) -> None:
        """Stop counting."""


class Timers(Protocol):
    """Timers by name, as Megatron's `config.timers`."""

    def __call__(self, name: str, log_level: int = ...) -> Timer:
        """Return a timer: forward-recv, backward-recv, forward-send or backward-send."""


class P2POptions(TypedDict, total=False):
    """Keyword arguments of all four functions.

    Attributes:
        is_end_stage: The last logical stage of this rank is meant, not the first.
        domain: Data-parallel pipeline; default 0.
        microbatch: Name of the microbatch for errors, compared with the other end's.
        timers: Timers, of which the one of the function, such as `forward-recv`, runs until the
            call returns; None: no timing.
    """

    is_end_stage: bool
    domain: int
    microbatch: int | None
    timers: Timers | None


Received = Handle[tuple[Tensor, ...]]
"""Handle of an asynchronous receive; its `wait` returns a tuple of one tensor."""


@overload
def vtp_recv_forward(
    tensor_shape: Sequence[int],
    transport: Transport,
    *,
    dtype: torch.dtype,
    async_op: Literal[False] = ...,
    **options: Unpack[P2POptions],
) -> Tensor | None: ...
@overload
def vtp_recv_forward(
    tensor_shape: Sequence[int],
    transport: Transport,
    *,
    dtype: torch.dtype,
    async_op: Literal[True],
    **options: Unpack[P2POptions],
) -> Received | None: ...
def vtp_recv_forward(
    tensor_shape: Sequence[int],
    transport: Transport,
    *,
    dtype: torch.dtype,
    async_op: bool = False,
    **options: Unpack[P2POptions],
) -> Tensor | Received | None:
    """Receive the input of a stage from the one before it; timer `forward-recv`.

    Args:
        tensor_shape: Global shape, also where a rank gets a part.
        transport: Transport of the layout.
        dtype: Dtype of the tensor.
        async_op: Return a handle at once.
        **options: See `P2POptions`.

    Returns:
        The tensor, a leaf that requires grad; with `async_op` a handle whose `wait` returns a tuple
        of it. None at the start of the chain.

    Raises:
        TransferError: If the transfer fails.
    """
    meta = TensorMeta(tuple(tensor_shape), dtype)
    return _receive(transport, meta, step=-1, async_op=async_op, options=options)


@overload
def vtp_recv_backward(
    tensor_shape: Sequence[int],
    transport: Transport,
    *,
    dtype: torch.dtype,
    async_op: Literal[False] = ...,
    **options: Unpack[P2POptions],
) -> Tensor | None: ...
@overload
def vtp_recv_backward(
    tensor_shape: Sequence[int],
    transport: Transport,
    *,
    dtype: torch.dtype,
    async_op: Literal[True],
    **options: Unpack[P2POptions],
) -> Received | None: ...
def vtp_recv_backward(
    tensor_shape: Sequence[int],
    transport: Transport,
    *,
    dtype: torch.dtype,
    async_op: bool = False,
    **options: Unpack[P2POptions],
) -> Tensor | Received | None:
    """Receive the gradient of a stage's output from the one after it; timer `backward-recv`.

    Arguments and result are as for `vtp_recv_forward`, but the gradient does not require grad. None
    at the end of the chain.

    Raises:
        TransferError: If the transfer fails.
    """
    meta = TensorMeta(tuple(tensor_shape), dtype)
    return _receive(transport, meta, step=1, async_op=async_op, options=options)


def vtp_send_forward(
    tensor: Tensor,
    transport: Transport,
    *,
    tensor_shape: Sequence[int] | None = None,
    **options: Unpack[P2POptions],
) -> Handle[None] | None:
    """Start to send the output of a stage to the one after it; timer `forward-send`.

    Args:
        tensor: This rank's part.
        transport: Transport of the layout.
        tensor_shape: Global shape; needed where the boundary of this stage is sharded.
        **options: See `P2POptions`.

    Returns:
        A handle, which may be dropped; None at the end of the chain.

    Raises:
        TransferError: If the transport has failed.
    """
    return _send(transport, tensor, tensor_shape, step=1, options=options)


def vtp_send_backward(
    tensor: Tensor,
    transport: Transport,
    *,
    tensor_shape: Sequence[int] | None = None,
    **options: Unpack[P2POptions],
) -> Handle[None] | None:
    """Start to send the gradient of a stage's input to the one before; timer `backward-send`.

    Arguments and result are as for `vtp_send_forward`. None at the start of the chain.

    Raises:
        TransferError: If the transport has failed.
    """
    return _send(transport, tensor, tensor_shape, step=-1, options=options)


def logical_stage(transport: Transport, *, is_end_stage: bool = False) -> int:
    """Return the first logical stage of this rank, or its last; one unless the chain returns."""
    return transport.layout.logical_stages_of(transport.rank)[-1 if is_end_stage else 0]


def _receive(
    transport: Transport,
    meta: TensorMeta,
    *,
    step: int,
    async_op: bool,
    options: P2POptions,
) -> Tensor | Received | None:
    """Receive from the stage that is `step` further on in the chain, if there is one."""
    ends = _ends(transport, step, options)
    if ends is None:
        return None  # whatever form it would have
    with _timed(options.get("timers"), "forward-recv" if step < 0 else "backward-recv"):
        handle = transport.receive(
            [meta],
            source=ends[1],
            destination=ends[0],
            domain=options.get("domain", 0),
            microbatch=options.get("microbatch"),
        )
        return handle if async_op else handle.wait()[0]


def _send(
    transport: Transport,
    tensor: Tensor,
    tensor_shape: Sequence[int] | None,
    *,
    step: int,
    options: P2POptions,
) -> Handle[None] | None:
    """Send to the stage that is `step` further on in the chain, if there is one."""
    ends = _ends(transport, step, options)
    if ends is None:
        return None
    with _timed(options.get("timers"), "forward-send" if step > 0 else "backward-send"):
        return transport.send(
            [tensor],
            source=ends[0],
            destination=ends[1],
            domain=options.get("domain", 0),
            metas=None if tensor_shape is None else [TensorMeta(tuple(tensor_shape), tensor.dtype)],
            microbatch=options.get("microbatch"),
        )


def _ends(transport: Transport, step: int, options: P2POptions) -> tuple[int, int] | None:
    """Return this rank's logical stage and the other one; None beyond the ends of the chain."""
    here = logical_stage(transport, is_end_stage=options.get("is_end_stage", False))
    there = here + step
    return (here, there) if 0 <= there < transport.layout.num_stages else None


def _timed(timers: Timers | None, name: str) -> AbstractContextManager[None]:
    return nullcontext() if timers is None else _running(timers(name, log_level=2))


@contextmanager
def _running(timer: Timer) -> Iterator[None]:
    timer.start()
    try:
        yield
    finally:
        timer.stop()
