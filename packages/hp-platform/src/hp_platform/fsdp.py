"""What FSDP2 (`torch.distributed.fsdp.fully_shard`) has no switch for, or leaves to others.

Note [Gloo by pairs]. Gloo gathers in a ring, so that what a rank has travels through all others,
and its reduce-scatter sums all of the input on every rank. Between processes of a CPU, where each
copy is CPU time, a message from each rank to each other one moves the same shards in two thirds of
the time, and a reduce-scatter as an exchange with a sum behind it takes less than half.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_platform import _internals


def set_fsdp_frees_parameters(module: object, frees: bool) -> None:
    """Say whether a sharded module may free its gathered parameters; `reshard` then does nothing.

    FSDP2 decides after a forward whether to free by what it did last. If a backward of the same
    module ran meanwhile in another thread, it frees although told not to
    (`set_reshard_after_forward(False)`), under the feet of that backward.

    Args:
        module: One that `fully_shard` was applied to; not those inside it.
        frees: True brings back the usual behaviour.
    """
    for group in _internals.fsdp_param_groups(module):
        if frees:
            vars(group).pop("reshard", None)
        else:
            group.reshard = _keep


def _keep() -> None:
    """Take the place of FSDP's own function."""


def set_fsdp_exchanges(module: Any, *, group: ProcessGroup) -> None:
    """Let a sharded module gather and reduce over Gloo in less time; see Note [Gloo by pairs].

    Sums are in rank order. Without effect on other backends.

    Args:
        module: One that `fully_shard` was applied to over one mesh axis; not those inside it.
        group: Of that axis.
    """
    if _internals.backend_name(group, torch.device("cpu")) != "gloo":
        return
    module.set_custom_all_gather(_GatherByPairs())
    module.set_custom_reduce_scatter(_ReduceByExchange())


class _Exchange:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _GatherByPairs(_Exchange):
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
        others = [(rank + distance) % num_ranks for distance in range(1, num_ranks)]
        works = [group.recv([parts[other]], other, 0) for other in reversed(others)]
        works += [group.send([parts[rank]], other, 0) for other in others]
        work = _AllOf(works, output_tensor)
        if async_op:
            return work
        work.wait()
        return None


class _ReduceByExchange(_Exchange):
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
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(group.size(), -1), 0, out=output_tensor)
        return None


class _AllOf(dist.Work):
    """Several operations as one, with what they write."""

    def __init__(self, works: Sequence[dist.Work], output: Tensor) -> None:
        super().__init__()
        self._works, self._output = works, output

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout)
        self._works = ()
        return True
