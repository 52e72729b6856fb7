"""What FSDP2 (`torch.distributed.fsdp.fully_shard`) has no switch for, or leaves to others.

Note [Gloo by pairs]. Gloo gathers in a ring, so that what a rank has travels through all others,
and its reduce-scatter sums all of the input on every rank. Between processes of a CPU, where each
copy is CPU time, a message from each rank to each other one moves the same shards in two thirds of
the time, and a reduce-scatter as an exchange with a sum behind it takes less than half. Where all
ranks are processes of one machine, both go through memory that they share (`shared_memory.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_platform import _internals
from hp_platform.collectives.collectives import add_up
from hp_platform.collectives.shared_memory import Channel, Exchange


def set_fsdp_frees_parameters(module: object, frees: bool) -> None:
    """Say whether a sharded module may free its gathered parameters; `reshard` then does nothing.

    FSDP2 decides after a forward whether to free by what it did last. If a backward of the same
    module ran meanwhile in another thread, it frees although told not to
    (`set_reshard_after_forward(False)`), under the feet of that backward.

    Args:
        module: Module that was passed to `fully_shard`; modules sharded inside it are not affected.
        frees: True brings back the usual behaviour.
    """
    for group in _internals.fsdp_param_groups(module):
        if frees:
            vars(group).pop("reshard", None)
        else:
            group.reshard = lambda: None


def set_fsdp_exchanges(module: Any, *, group: ProcessGroup) -> None:
    """Let a sharded module gather and reduce over Gloo in less time; see Note [Gloo by pairs].

    Sums are in rank order. Without effect on other backends. All ranks of the group call this
    together.

    Args:
        module: One that `fully_shard` was applied to over one mesh axis; not those inside it.
        group: Process group of that axis.
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
    module.set_custom_all_gather(_Gather(gathers))
    module.set_custom_reduce_scatter(_ReduceScatter(reductions))


# Of each group what gathers go through and what reductions do, which may run in two threads.
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
            rows = parts.view(torch.uint8)

            def read(memories: list[Tensor]) -> None:
                for other, memory in enumerate(memories):
                    if other != rank:
                        rows[other].copy_(memory)

            size = rows.shape[1]
            works = [self._channel.post(size, fill=lambda m: m.copy_(rows[rank]), read=read)]
        else:
            others = [(rank + distance) % num_ranks for distance in range(1, num_ranks)]
            works = [group.recv([parts[other]], other, 0) for other in reversed(others)]
            works += [group.send([parts[rank]], other, 0) for other in others]
        work = _AllOf(works, output_tensor)
        if async_op:
            return work
        work.wait()
        return None


class _ReduceScatter(_Exchange):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
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
            target = memory.view(whole.dtype).view(whole.shape)
            for others in (slice(rank), slice(rank + 1, None)):
                target[others].copy_(whole[others])

        def read(memories: list[Tensor]) -> None:
            parts = [memory.view(whole.dtype).view(whole.shape)[rank] for memory in memories]
            parts[rank] = whole[rank]  # which was not copied
            add_up(parts, out=output_tensor)

        self._channel.post(whole.nbytes, fill=fill, read=read).wait()
        return None


class _AllOf(dist.Work):
    """Several operations as one, with what they write."""

    def __init__(self, works: Sequence[dist.Work | Exchange], output: Tensor) -> None:
        super().__init__()
        self._works, self._output = works, output

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            if isinstance(work, Exchange):
                work.wait()
            else:
                work.wait(timeout)
        self._works = ()
        return True
