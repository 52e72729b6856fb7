"""Settings and exchanges that FSDP2 (`torch.distributed.fsdp.fully_shard`) does not offer.

`set_fsdp_gather_dtype` lets it gather parameters in a narrower dtype than that of their gradients.

Note [Gloo by pairs]. Gloo gathers in a ring, so that each shard passes through all other ranks, and
its reduce-scatter sums the whole input on every rank. Between processes of a CPU each copy costs
CPU time: a message from each rank to each other rank moves the same shards in two thirds of the
time, and a reduce-scatter as an exchange with a sum after it takes less than half. If all ranks are
processes of one machine, both exchanges go through shared memory (`shared_memory.py`).

Note [Gathered in place]. FSDP copies the shards of a unit into one tensor, gathers that, and copies
parameters out of it. If the tensor is memory that all ranks share, each rank writes its own part
and copies no part of another rank. Before a rank writes again, the others must have copied their
parameters. A rank copies them right after it has waited for a gather, so its copies are complete
once it sends gradients of the unit. If no gradients were reduced since the gather, ranks wait for
each other. Gradients are written into memory that other ranks can read in the same way.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hp_platform import _internals
from hp_platform.collectives.collectives import add_up
from hp_platform.collectives.shared_memory import Channel, Exchange


def set_fsdp_frees_parameters(module: object, frees: bool) -> None:
    """Set whether a sharded module may free gathered parameters; if not, `reshard` does nothing.

    FSDP2 decides after a forward by its last action whether to free them. If a backward of the same
    module runs meanwhile in another thread, FSDP2 frees parameters that this backward needs,
    despite `set_reshard_after_forward(False)`.

    Args:
        module: Module that was passed to `fully_shard`; modules sharded inside it do not change.
        frees: True restores the usual behaviour.
    """
    for group in _internals.fsdp_param_groups(module):
        if frees:
            vars(group).pop("reshard", None)
        else:
            group.reshard = lambda: None


def set_fsdp_hooks(module: object, *, active: bool) -> None:
    """Set whether forward and backward of a sharded module gather, free and reduce by themselves.

    Without hooks, gather parameters before calling the module (`unshard`); they stay until they are
    freed. Gradients accumulate in them until the next backward that begins in a method of the
    outermost sharded module (`register_fsdp_forward_method`) reduces them. The setting has no
    effect if a `MixedPrecisionPolicy` casts, because hooks do the casting.

    Args:
        module: Module that was passed to `fully_shard`; modules sharded inside it do not change.
            Set the outermost module first.
        active: True restores the usual behaviour.
    """
    _internals.set_fsdp_hooks(module, active)


def set_fsdp_exchanges(module: Any, *, group: ProcessGroup, in_place: bool = False) -> None:
    """Let a sharded module gather and reduce over Gloo in less time; see Note [Gloo by pairs].

    Sums are in rank order. Other backends are not affected. All ranks of the group call this
    together.

    Args:
        module: Module that `fully_shard` was applied to over one mesh axis; modules sharded inside
            it do not change.
        group: Process group of that axis.
        in_place: Whether ranks of one machine share one copy of the module's parameters, in the
            gathered dtype, and copy less in a gather. See Note [Gathered in place].
    """
    cpu = torch.device("cpu")
    if group.size() == 1 or _internals.backend_name(group, cpu) != "gloo":
        return
    if group not in _channels:
        timeout = _internals.group_timeout(group, cpu) or _TIMEOUT
        _channels[group] = (
            Channel.connect(group, num_slots=2, timeout=timeout),
            Channel.connect(group, num_slots=1, timeout=timeout),
        )
    gathers, reductions = _channels[group]
    gather = _GatherInPlace(gathers) if in_place and gathers is not None else _Gather(gathers)
    module.set_custom_all_gather(gather)
    module.set_custom_reduce_scatter(_ReduceScatter(reductions, gather))


# Channels of each group for gathers and for reductions, which may run in two threads.
_channels: WeakKeyDictionary[ProcessGroup, tuple[Channel | None, Channel | None]] = (
    WeakKeyDictionary()
)
_TIMEOUT = timedelta(minutes=30)


class _Exchange:
    def __init__(self, channel: Channel | None) -> None:
        self._channel = channel

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Exchange):
    last: "_AllOf | None" = None  # the gather that began last

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if output_tensor.device.type != "cpu":
            usual: dist.Work | None = dist.all_gather_into_tensor(
                output_tensor, input_tensor, group, async_op
            )
            return usual
        num_ranks, rank = group.size(), group.rank()
        parts = output_tensor.view(num_ranks, -1)
        if parts[rank].data_ptr() != input_tensor.data_ptr():
            parts[rank].copy_(input_tensor.view(-1))
        works: list[dist.Work | Exchange]
        if self._channel is not None:
            works = [self.post(parts, self._channel, rank)]
        else:
            others = [(rank + distance) % num_ranks for distance in range(1, num_ranks)]
            works = [group.recv([parts[other]], other, 0) for other in reversed(others)]
            works += [group.send([parts[rank]], other, 0) for other in others]
        self.last = work = _AllOf(works, output_tensor)
        if async_op:
            return work
        work.wait()
        return None

    def was_reduced(self) -> None:
        """Note that all ranks have sent gradients of the unit."""

    def post(self, parts: Tensor, channel: Channel, rank: int) -> Exchange:
        """Begin to exchange parts, [ranks, numel of each]."""
        rows = parts.view(torch.uint8)

        def read(memories: list[Tensor]) -> None:
            for other, memory in enumerate(memories):
                if other != rank:
                    rows[other].copy_(memory)

        return channel.post(rows.shape[1], fill=lambda m: m.copy_(rows[rank]), read=read)


class _GatherInPlace(_Gather):
    _memory: Tensor | None = None
    _is_copied = True  # by all ranks, as far as this one knows

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory that all ranks share; see Note [Gathered in place]."""
        if device.type != "cpu" or self._channel is None:
            return super().allocate(size, dtype=dtype, device=device)
        num_bytes = math.prod(size) * dtype.itemsize
        if self._memory is None or self._memory.nbytes != num_bytes:
            self._memory = self._channel.common(num_bytes)
        elif not self._is_copied:
            _announce(self._channel).wait()
        self._is_copied = False
        return self._memory.view(dtype).view(*size)

    def post(self, parts: Tensor, channel: Channel, rank: int) -> Exchange:
        """Announce that this rank has written its part."""
        if self._memory is None or parts.data_ptr() != self._memory.data_ptr():
            return super().post(parts, channel, rank)
        return _announce(channel)

    def was_reduced(self) -> None:
        """Note that ranks have copied the gathered parameters, if they waited for the gather."""
        self._is_copied = self.last is not None and self.last.is_over


def _announce(channel: Channel) -> Exchange:
    """Announce that this rank has come here, without any bytes."""
    return channel.post(0, fill=lambda _: None, read=lambda _: None)


class _ReduceScatter(_Exchange):
    _input: Tensor | None = None  # allocated, and not yet reduced

    def __init__(self, channel: Channel | None, gather: _Gather) -> None:
        super().__init__(channel)
        self._gather = gather

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory that other ranks can read for an input, private memory for an output."""
        if self._channel is None or self._input is not None or device.type != "cpu":
            return super().allocate(size, dtype=dtype, device=device)
        memory = self._channel.memory(math.prod(size) * dtype.itemsize)
        self._input = memory.view(dtype).view(*size)
        return self._input

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> dist.Work | None:
        allocated, self._input = self._input, None
        if output_tensor.device.type != "cpu" or op != dist.ReduceOp.SUM or async_op:
            usual: dist.Work | None = dist.reduce_scatter_tensor(
                output_tensor, input_tensor, op, group, async_op
            )
            return usual
        rank, whole = group.rank(), input_tensor.view(group.size(), -1)
        if self._channel is None:
            exchanged = torch.empty_like(whole)
            dist.all_to_all_single(exchanged, whole, group=group)
            add_up([*exchanged], out=output_tensor)
            return None

        def fill(memory: Tensor) -> None:
            if allocated is not None and allocated.data_ptr() == whole.data_ptr():
                return  # the memory already has the values
            target = memory.view(whole.dtype).view(whole.shape)
            for others in (slice(rank), slice(rank + 1, None)):
                target[others].copy_(whole[others])

        def read(memories: list[Tensor]) -> None:
            parts = [memory.view(whole.dtype).view(whole.shape)[rank] for memory in memories]
            parts[rank] = whole[rank]  # its own part was not copied
            add_up(parts, out=output_tensor)

        self._channel.post(whole.nbytes, fill=fill, read=read).wait()
        self._gather.was_reduced()
        return None


class _AllOf(dist.Work):
    """Several operations as one, with their output."""

    def __init__(self, works: Sequence[dist.Work | Exchange], output: Tensor) -> None:
        super().__init__()
        self._works, self._output = works, output

    @property
    def is_over(self) -> bool:
        """Tell whether `wait` has returned."""
        return not self._works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            if isinstance(work, Exchange):
                work.wait()
            else:
                work.wait(timeout)
        self._works = ()
        return True


aten = torch.ops.aten


class NarrowParameter(Tensor):
    """Tensor that reports one dtype and stores its values in a narrower dtype; read-only.

    It can be sliced, cast to the narrower dtype, used as the table of
    `torch.nn.functional.embedding` and get a gradient. Other operators are refused, because they
    would use rounded values as exact values.

    Args:
        stored: Values in the narrower dtype, contiguous.
        dtype: Dtype that the tensor reports.
    """

    stored: Tensor

    def __new__(cls, stored: Tensor, dtype: torch.dtype) -> Self:
        """Make a tensor without memory of its own."""
        made: Self = _internals.make_wrapper(cls, stored, dtype=dtype)
        made.stored = stored
        return made

    def __repr__(self) -> str:  # type: ignore[override]  # torch's has an argument of its own
        """Show both dtypes."""
        return f"NarrowParameter({self.stored}, dtype={self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        """See torch's protocol for compilers."""
        return ["stored"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        tensors: dict[str, Tensor], dtype: torch.dtype, size: object, stride: object
    ) -> "NarrowParameter":
        """See torch's protocol for compilers."""
        del size, stride
        return NarrowParameter(tensors["stored"], dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares what stands for none
        cls,
        func: object,
        types: object,
        args: _internals.Arguments = (),
        kwargs: _internals.Keywords | None = None,
    ) -> Tensor:
        """Run one of the operators that are allowed."""
        run = _READS.get(func)
        found = None if run is None else run(*args, **kwargs or {})
        if found is None:
            raise ValueError(
                f"a parameter that FSDP gathers in another dtype (set_fsdp_gather_dtype) must be "
                f"cast to that before anything else reads it: {func}"
            )
        return found


def _again(x: NarrowParameter, *_args: object) -> Tensor | None:
    return NarrowParameter(x.stored.detach(), x.dtype)


def _reshaped(
    x: NarrowParameter, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Tensor | None:
    is_same = (tuple(size), tuple(stride), offset or 0) == (tuple(x.shape), x.stride(), 0)
    return _again(x) if is_same else None


def _cast(
    x: NarrowParameter, *, dtype: torch.dtype | None = None, **_others: object
) -> Tensor | None:
    return x.stored.detach() if dtype == x.stored.dtype else None


def _part(x: NarrowParameter, *place: int | None) -> Tensor:
    return NarrowParameter(aten.slice.Tensor(x.stored, *place), x.dtype)


def _rows(x: NarrowParameter, ids: Tensor, *options: object) -> Tensor:
    # The values of a row are narrow, and their sum in backward is wide.
    rows: Tensor = aten.embedding.default(x.stored, ids, *options)
    return rows.to(x.dtype)


_READS: dict[object, Callable[..., Tensor | None]] = {
    aten.detach.default: _again,
    aten.alias.default: _again,
    aten.as_strided.default: _reshaped,
    aten.slice.Tensor: _part,
    _internals.to_copy: _cast,
    aten.embedding.default: _rows,
}


def set_fsdp_gather_dtype(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Let FSDP2 gather parameters in a narrower dtype.

    With `MixedPrecisionPolicy(param_dtype=torch.bfloat16)` the gathered parameter is a bf16 tensor,
    so that autograd rounds and sums its gradients in bf16, for all parameters of a module. Here
    each parameter has its own gathered dtype, through the hooks that FSDP2 offers
    (`fsdp_pre_all_gather`): the shard is cast, and half of the bytes are exchanged and stored. The
    module sees a tensor that reports the dtype of the shard and gets gradients of that dtype, but
    stores its values in the narrow dtype. A cast before the gather gives the same bits as a cast
    after it. Code that reads such a parameter casts it, which costs nothing.

    Gradients stay in the dtype of the parameter. Code that uses the gathered parameter must cast it
    to `dtype` first, or look up rows in it (`torch.nn.functional.embedding`); other uses raise
    ValueError.

    Args:
        parameters: Parameters that `fully_shard` has sharded, already on their device. Parameters
            of one module may have several gathered dtypes. Parameters of `dtype` are not changed.
        dtype: Dtype in which the parameters are gathered.

    Raises:
        TypeError: If a parameter is not sharded.
    """
    for parameter in parameters:
        if not isinstance(parameter, DTensor):
            raise TypeError(
                f"parameter of shape {tuple(parameter.shape)} must be sharded by fully_shard"
            )
        if parameter.dtype == dtype:
            continue
        shard = _internals.shard_of(parameter)
        hooks = _Hooks(weakref.ref(shard), dtype)
        shard.fsdp_pre_all_gather = hooks.before
        shard.fsdp_post_all_gather = hooks.after


class _Hooks:
    """Hooks that FSDP2 calls for a shard, before and after it gathers."""

    def __init__(self, shard: Callable[[], Tensor | None], dtype: torch.dtype) -> None:
        self._shard, self._dtype = shard, dtype

    def before(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: object,
    ) -> tuple[tuple[Tensor], torch.Size]:
        """Return the shard to gather, padded as FSDP2 expects it, and the whole size."""
        del outer_stride, module, mp_policy
        shard = self._shard()
        assert shard is not None
        size = list(shard.shape)
        if size[1:] == list(outer_size[1:]):
            size[0] = -(-outer_size[0] // mesh.size())
        padded = shard.as_strided(size, shard.stride())  # its memory is as large on every rank
        return (padded.to(self._dtype),), outer_size

    def after(
        self,
        outputs: Sequence[Tensor],
        outer_size: torch.Size,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the parameter for the module; later gathers fill the same memory."""
        if out is not None:
            return None
        (whole,) = outputs
        values = whole.reshape(-1)[: outer_size.numel()].view(outer_size)
        return NarrowParameter(values, dtype), ()
