"""Numbers and gradients over all ranks of a layout.

Every parameter has a layout name, which is the same on every rank that holds it or a part of it.
All functions are collectives: every rank of the group calls them.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hp_platform import agree, float64_norms, new_group
from hp_vtp.topology import PipelineLayout

__all__ = [
    "ReplicaGradients",
    "all_ok",
    "barrier",
    "global_grad_norm",
    "loss_scale",
]


def all_ok(ok: bool, *, group: ProcessGroup) -> bool:
    """Tell whether `ok` is true on all ranks of a CPU group."""
    flag = torch.tensor(int(ok))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return bool(flag)


def barrier(*, group: ProcessGroup, where: str = "") -> None:
    """Wait for all ranks of a CPU group.

    Raises:
        RuntimeError: If a rank is gone, or the time-out of the group is over.
    """
    agree(group=group, where=where)


def loss_scale(layout: PipelineLayout, num_microbatches: int) -> float:
    """Return the factor of a microbatch's loss with which gradients are of the mean of all losses.

    A stage that serves several domains adds up the gradients of all of them itself; the replicas of
    the others are summed by `ReplicaGradients`. With this scale both are the gradient of the mean,
    and no gradient is ever divided.

    Args:
        layout: Layout, of which the number of domains is read.
        num_microbatches: Number of microbatches of one domain in one step.
    """
    return 1.0 / (layout.num_domains * num_microbatches)


class ReplicaGradients:
    """Sums gradients over the replicas of each stage. Every rank of the world makes one."""

    def __init__(
        self,
        layout: PipelineLayout,
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """Create the groups of ranks that hold the same parameters.

        Args:
            layout: Pipeline layout of the ranks.
            backend: Backend of the groups; by default that of the default group.
            timeout: Time-out of each operation; by default that of the default group.
        """
        lists = [
            sorted(part[i] for part in stage.replicas)
            for stage in layout.stages
            if len(stage.replicas) > 1
            for i in range(stage.tp_size)
        ]
        self._group: ProcessGroup | None = None
        if lists:
            self._group = new_group(lists, name="vtp/replicas", backend=backend, timeout=timeout)

    def sum(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace each gradient by the sum over the replicas; a missing one counts as zero.

        Args:
            parameters: All parameters of this rank, in the same order on all replicas. One that
                appears twice, as tied ones do, is summed once: do not call this once per module.
        """
        if self._group is None:
            return
        works = []
        for parameter in {id(parameter): parameter for parameter in parameters}.values():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                works.append(dist.all_reduce(parameter.grad, group=self._group, async_op=True))
        for work in works:
            if work is not None:
                work.wait()

    def close(self) -> None:
        """Destroy the group."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def global_grad_norm(
    parameters: Mapping[str, nn.Parameter],
    *,
    layout: PipelineLayout,
    group: ProcessGroup,
    is_sharded: Callable[[str], bool],
    norm_type: float = 2.0,
) -> Tensor:
    """Return the norm of the gradient of the whole model, each parameter counted once.

    Shards of a parameter are all counted; of copies, those over the ranks of a stage and those over
    its replicas, one is. Sums are made in float64. Gradients have to be summed over replicas first.

    Args:
        parameters: Parameters of this rank, by name. One that appears under several names counts
            once.
        layout: Pipeline layout of the ranks.
        group: CPU group of all ranks of the layout.
        is_sharded: Whether the ranks of a stage have different parts of the parameter of a name.
        norm_type: 2 or infinity.

    Returns:
        A float64 tensor of shape () on the CPU; NaN if any gradient has one.

    Raises:
        ValueError: If `norm_type` is neither.
    """
    if norm_type not in (2.0, math.inf):
        raise ValueError(f"norm_type ({norm_type}) must be 2 or inf")
    rank = dist.get_rank()
    counted = {
        id(parameter): parameter.grad
        for name, parameter in parameters.items()
        if parameter.grad is not None
        and layout.replica_of(rank) == 0
        and (is_sharded(name) or layout.tp_rank_of(rank) == 0)
    }
    parts = float64_norms([*counted.values()], norm_type)
    mine = torch.stack(parts).cpu() if parts else torch.zeros(1, dtype=torch.float64)
    if norm_type == 2.0:
        total = mine.square().sum()
        dist.all_reduce(total, group=group)
        return total.sqrt()
    # A maximum may lose a NaN on its way, so that is asked for too.
    found = torch.stack([mine.nan_to_num(0.0, math.inf).max(), mine.isnan().any().double()])
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return found[0] if not found[1] else torch.tensor(math.nan, dtype=torch.float64)
