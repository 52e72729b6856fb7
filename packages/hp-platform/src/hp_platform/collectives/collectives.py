"""Differentiable collectives: all-to-all in four forms, gather and scatter of uneven shards.

Shapes: N rows of this rank before the exchange, M rows after, `...` any further dims.

| function | differentiable | waits in forward | waits in backward |
|---|---|---|---|
| `all_to_all` | yes | before it returns | before it returns |
| `all_to_all_lazy` | yes | at the first use of the result | at the first use of the gradient |
| `start_all_to_all`, `all_to_all_wait` | yes | in the second | in backward of the first |
| `launch_all_to_all`, `launch_all_gather` | no | in `Pending.wait` | |
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hp_platform import _internals
from hp_platform.collectives.pending import Pending
from hp_platform.groups import resolve_group
from hp_platform.threads import note_use

Splits = list[int] | None


def all_to_all(
    x: Tensor,
    *,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    group: ProcessGroup | DeviceMesh,
) -> Tensor:
    """Send a block of rows to every rank of `group`; return the received rows in rank order.

    Backward is the same exchange with the splits swapped.

    Args:
        x: `[N, ...]`, any floating dtype.
        output_splits: Rows to receive from each rank, M in all; None: all blocks are equal.
        input_splits: Rows to send to each rank, N in all; None if and only if `output_splits` is.
        group: Group or one-dimensional mesh.

    Returns:
        `[M, ...]`, ready to use.

    Raises:
        ValueError: If the splits do not fit the group or the rows; before anything is sent.
    """
    y: Tensor = _AllToAll.apply(x, *_resolved(x, output_splits, input_splits, group), False)
    return y


def all_to_all_lazy(
    x: Tensor,
    *,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    group: ProcessGroup | DeviceMesh,
) -> Tensor:
    """Start an `all_to_all`; the first use of its result, or of its gradient, waits for it.

    Result and gradient are of the class `AsyncCollectiveTensor`. The first operation that reads one
    waits (views do not), so that operations before it overlap with the exchange. torch's own
    differentiable all-to-all is lazy in forward only. The compiler places the wait in graphs.
    """
    y: Tensor = _AllToAll.apply(x, *_resolved(x, output_splits, input_splits, group), True)
    return y


def wait_tensor(x: Tensor) -> Tensor:
    """Wait for the collective that writes `x`, if there is one; differentiable, without a copy."""
    if not isinstance(x, _internals.AsyncCollectiveTensor):
        return x
    y: Tensor = _WaitTensor.apply(x)
    return y


def is_waited(x: Tensor) -> bool:
    """Tell whether `x` can be read without waiting for a collective."""
    return not isinstance(x, _internals.AsyncCollectiveTensor) or bool(x.completed)


def launch_all_to_all(
    x: Tensor,
    *,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    group: ProcessGroup | DeviceMesh,
) -> Pending[Tensor]:
    """Start the exchange of `all_to_all` outside autograd; arguments and errors are the same.

    The received rows have no gradient; `start_all_to_all` starts an exchange with a gradient.
    """
    splits, pg = _resolved(x, output_splits, input_splits, group)
    return _launch(x, *splits, pg)[1]


def launch_all_gather(x: Tensor, *, group: ProcessGroup | DeviceMesh) -> Pending[Tensor]:
    """Start to gather the `[N, ...]` of every rank, all of one shape, outside autograd.

    The result has no gradient; the result of `all_gather_uneven` has one.

    Returns:
        `[ranks * N, ...]` in rank order, after a wait.

    Raises:
        ValueError: If `x` has no dim.
    """
    pg = resolve_group(group)
    if x.ndim == 0:
        raise ValueError(f"rank {pg.rank()} of {pg.size()}: x.ndim (0) must be at least 1")
    note_use(pg)
    x = wait_tensor(x.detach()).contiguous()
    y = x.new_empty((pg.size() * x.shape[0], *x.shape[1:]))
    work = _internals.all_gather(y, x, group=pg, async_op=True)
    return Pending(y, works=[] if work is None else [work], buffers=[x, y])


class StartedAllToAll:
    """Exchange that `start_all_to_all` has started and `all_to_all_wait` finishes.

    The tensor `edge` connects both functions in the autograd graph and must not be read, because
    forward still writes it. The reversed exchange of backward is stored in `backward` and not in
    the gradient of `edge`, whose number of rows differs if splits are uneven.
    """

    __slots__ = ("backward", "edge", "forward", "group", "inputs", "outputs")

    def __init__(self, outputs: Splits, inputs: Splits, group: ProcessGroup) -> None:
        self.outputs, self.inputs, self.group = outputs, inputs, group
        self.edge: Tensor | None = None
        self.forward: Pending[Tensor] | None = None
        self.backward: Pending[Tensor] | None = None


def start_all_to_all(
    x: Tensor,
    *,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    group: ProcessGroup | DeviceMesh,
) -> StartedAllToAll:
    """Start an exchange that `all_to_all_wait` finishes; arguments and errors as `all_to_all`.

    Backward starts its exchange where forward waited and waits where forward started, so that the
    operations between the two calls overlap with the exchange in both passes.
    """
    splits, pg = _resolved(x, output_splits, input_splits, group)
    started = StartedAllToAll(*splits, pg)
    started.edge = _Start.apply(x, started)
    return started


def all_to_all_wait(started: StartedAllToAll) -> Tensor:
    """Wait for an exchange and return its `[M, ...]` rows.

    Raises:
        RuntimeError: On a second call with the same exchange.
    """
    edge, started.edge = started.edge, None
    if edge is None:
        raise RuntimeError("all_to_all_wait must be called once per started exchange")
    y: Tensor = _Wait.apply(edge, started)
    return y


def all_gather_uneven(
    x: Tensor, *, sizes: Sequence[int], dim: int = 0, group: ProcessGroup | DeviceMesh
) -> Tensor:
    """Concatenate the shards of all ranks along `dim`; backward sums and scatters the gradients.

    Shards are padded to the longest for the exchange, so that unequal sizes cost bandwidth.

    Args:
        x: Shard of this rank, `sizes[rank]` long along `dim`.
        sizes: Length of every rank's shard.
        dim: Tensor dim to concatenate along.
        group: Group or one-dimensional mesh.

    Returns:
        `sum(sizes)` long along `dim`, the same on every rank.

    Raises:
        ValueError: If `sizes` does not fit the group or the shard.
    """
    pg = resolve_group(group)
    dim = _dim(x, dim)
    _require_sizes(sizes, pg, length=x.shape[dim], expected=None)
    y: Tensor = _AllGather.apply(x, list(sizes), dim, pg)
    return y


def reduce_scatter_uneven(
    x: Tensor, *, sizes: Sequence[int], dim: int = 0, group: ProcessGroup | DeviceMesh
) -> Tensor:
    """Sum over ranks and return this rank's shard along `dim`; backward gathers the gradients.

    It is the transpose of `all_gather_uneven`: `x` is `sum(sizes)` long along `dim`, the result
    `sizes[rank]`. Gloo on a CPU exchanges the parts without padding. Errors are the same.
    """
    pg = resolve_group(group)
    dim = _dim(x, dim)
    _require_sizes(sizes, pg, length=x.shape[dim], expected=sum(sizes))
    y: Tensor = _ReduceScatter.apply(x, list(sizes), dim, pg)
    return y


class _Context(Protocol):
    """Context of a function of autograd: arguments that its backward needs.

    Attributes:
        call: Arguments of the transposed exchange.
        started: Exchange that was started.
    """

    call: tuple[object, ...]
    started: StartedAllToAll


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, x: Tensor, splits: tuple[Splits, Splits], group: ProcessGroup, lazy: bool
    ) -> Tensor:
        outputs, inputs = splits
        ctx.call = ((inputs, outputs), group, lazy)
        y = _internals.functional_all_to_all(x.contiguous(), outputs, inputs, group)
        return y if lazy else _internals.functional_wait(y)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(grad, *ctx.call), None, None, None


class _WaitTensor(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: object, x: Tensor) -> Tensor:
        return _internals.functional_wait(x)

    @staticmethod
    def backward(_ctx: object, grad: Tensor) -> Tensor:
        return grad


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, started: StartedAllToAll) -> Tensor:
        ctx.started = started
        y, started.forward = _launch(x, started.outputs, started.inputs, started.group)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _Context, _token: Tensor) -> tuple[Tensor, None]:
        pending, ctx.started.backward = ctx.started.backward, None
        assert pending is not None, "the later part of backward came first"
        return pending.wait(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, edge: Tensor, started: StartedAllToAll) -> Tensor:
        ctx.started = started
        pending, started.forward = started.forward, None
        assert pending is not None, "it is there as long as the edge is"
        pending.wait()
        return edge

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None]:
        started: StartedAllToAll = ctx.started
        _, started.backward = _launch(grad, started.inputs, started.outputs, started.group)
        return grad, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, x: Tensor, sizes: list[int], dim: int, group: ProcessGroup
    ) -> Tensor:
        """Concatenate shards along `dim`; unequal shards are padded to the longest."""
        ctx.call = (sizes, dim, group)
        longest, is_even = max(sizes), min(sizes) == max(sizes)
        rows = x.movedim(dim, 0)
        y, whole = _empty(x, sum(sizes), dim)
        sent = rows.contiguous()
        if not is_even:
            sent = rows.new_zeros((longest, *rows.shape[1:]))
            sent[: rows.shape[0]] = rows
        in_place = is_even and whole.is_contiguous()
        gathered = whole if in_place else rows.new_empty((longest * len(sizes), *rows.shape[1:]))
        _internals.all_gather(gathered, sent, group=group)
        if not in_place:
            blocks = zip(gathered.split(longest), sizes, strict=True)
            torch.cat([block[:size] for block, size in blocks], out=whole)
        return y

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _ReduceScatter.apply(grad, *ctx.call), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, x: Tensor, sizes: list[int], dim: int, group: ProcessGroup
    ) -> Tensor:
        """Sum over ranks and return this rank's part along `dim`."""
        ctx.call = (sizes, dim, group)
        rows = x.movedim(dim, 0)
        y, mine = _empty(x, sizes[group.rank()], dim)
        if x.device.type == "cpu" and _internals.backend_name(group, x.device) == "gloo":
            _scatter_by_exchange(rows, sizes, group, out=mine)
            return y
        longest, sent = max(sizes), rows.contiguous()
        is_even = min(sizes) == longest
        if not is_even:
            padded = rows.new_zeros((len(sizes), longest, *rows.shape[1:]))
            for block, part in zip(padded, rows.split(sizes), strict=True):
                block[: part.shape[0]] = part
            sent = padded.flatten(0, 1)
        in_place = is_even and mine.is_contiguous()
        total = mine if in_place else rows.new_empty((longest, *rows.shape[1:]))
        _internals.reduce_scatter(total, sent, group=group)
        if not in_place:
            mine.copy_(total[: len(mine)])
        return y

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllGather.apply(grad, *ctx.call), None, None, None


def _launch(
    x: Tensor, outputs: Splits, inputs: Splits, group: ProcessGroup
) -> tuple[Tensor, Pending[Tensor]]:
    """Start an exchange; return the tensor that it is still writing, and its `Pending`."""
    x = wait_tensor(x.detach()).contiguous()
    rows = x.shape[0] if outputs is None else sum(outputs)
    y = x.new_empty((rows, *x.shape[1:]))
    work = dist.all_to_all_single(y, x, outputs, inputs, group=group, async_op=True)
    return y, Pending(y, works=[] if work is None else [work], buffers=[x, y])


def _empty(x: Tensor, length: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return a tensor like `x` but `length` long along `dim`, and its view with `dim` in front.

    A function of autograd must return the tensor: FSDP2 warns of modules that return views.
    """
    y = x.new_empty((*x.shape[:dim], length, *x.shape[dim + 1 :]))
    return y, y.movedim(dim, 0)


def _scatter_by_exchange(
    rows: Tensor, sizes: list[int], group: ProcessGroup, *, out: Tensor
) -> None:
    """Exchange parts and sum them in rank order: Note [Gloo by pairs] of `fsdp.py`."""
    parts = rows.new_empty((len(sizes), *out.shape))
    splits = [len(out)] * len(sizes)
    dist.all_to_all_single(parts.flatten(0, 1), rows.contiguous(), splits, sizes, group=group)
    if len(sizes) == 1:
        out.copy_(parts[0])
    else:
        add_up([*parts], out=out)


def add_up(parts: Sequence[Tensor], *, out: Tensor) -> None:
    """Sum two parts or more in their order, so that the sum does not depend on their arrival."""
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out += part


def _resolved(
    x: Tensor,
    outputs: Sequence[int] | None,
    inputs: Sequence[int] | None,
    mesh_or_group: ProcessGroup | DeviceMesh,
) -> tuple[tuple[Splits, Splits], ProcessGroup]:
    """Check the splits against the rows of `x` and the group; return them with the group."""
    group = resolve_group(mesh_or_group)
    note_use(group)
    where = f"rank {group.rank()} of {group.size()}"
    if x.ndim == 0:
        raise ValueError(f"{where}: x.ndim (0) must be at least 1")
    if outputs is None or inputs is None:
        if outputs is not None or inputs is not None:
            raise ValueError(f"{where}: output_splits and input_splits must be given together")
        if x.shape[0] % group.size():
            raise ValueError(
                f"{where}: group size ({group.size()}) must divide rows of x ({x.shape[0]})"
            )
        return (None, None), group
    _require_one_per_rank("output_splits", outputs, group)
    _require_one_per_rank("input_splits", inputs, group)
    if sum(inputs) != x.shape[0]:
        raise ValueError(
            f"{where}: sum of input_splits {list(inputs)} ({sum(inputs)}) must equal "
            f"rows of x ({x.shape[0]})"
        )
    return (list(outputs), list(inputs)), group


def _require_one_per_rank(name: str, numbers: Sequence[int], group: ProcessGroup) -> None:
    where = f"rank {group.rank()} of {group.size()}"
    if len(numbers) != group.size():
        raise ValueError(
            f"{where}: len({name}) ({len(numbers)}) must equal the group size ({group.size()})"
        )
    if min(numbers) < 0:
        raise ValueError(f"{where}: {name} ({list(numbers)}) must not be negative")


def _dim(x: Tensor, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim ({dim}) must be in [-{x.ndim}, {x.ndim})")
    return dim % x.ndim


def _require_sizes(
    sizes: Sequence[int], group: ProcessGroup, *, length: int, expected: int | None
) -> None:
    note_use(group)
    where = f"rank {group.rank()} of {group.size()}"
    _require_one_per_rank("sizes", sizes, group)
    own = (sizes[group.rank()], "sizes[rank]")
    mine, name = own if expected is None else (expected, "sum(sizes)")
    if mine != length:
        raise ValueError(f"{where}: {name} ({mine}) must equal the length of x ({length})")
