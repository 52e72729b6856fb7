"""The agreement of all ranks at the end of a step.

Note [one agreed step]: whatever one rank learns on its own (a stop was requested, a gradient is
not finite) goes into the vector that all ranks sum at the end of every step, so that all of them
act on it at the same step. No rank ever decides alone.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hp_platform.host_reads import arrived
from hp_trainer.layout.mesh import Mesh
from hp_trainer.training.gradients import GradientNorm
from hp_trainer.training.metrics import MemoryUse


class Losses(NamedTuple):
    """The terms of a step's loss: one rank's share of each, or the sum over all ranks.

    Attributes:
        tokens: Mean cross-entropy of the next token.
        balance: The load-balancing term, as it is added.
        prediction: Mean cross-entropy of all modules of multi-token prediction; `model.mtp_weight`
            times that is added.
    """

    tokens: float
    balance: float
    prediction: float


class Flags(NamedTuple):
    """Findings of one rank in a step, 0 or 1; summed, the number of ranks that have found so.

    Attributes:
        stop: A stop was requested.
        is_saved: A save behind the training is written.
        is_gone: The run directory is gone.
        overflowed: Rows for experts did not fit their buffers.
    """

    stop: float
    is_saved: float
    is_gone: float
    overflowed: float


class Agreed(NamedTuple):
    """The sums of a step over all ranks, the same on each.

    Attributes:
        losses: Losses of the whole step.
        busy: Sum of the ranks' shares of time in the pipeline that they computed in.
        cpu_seconds: CPU time of all ranks since the step before.
        flags: Ranks by what they have found out.
        squares: Squared gradient norms by entry, fp64 [entries] on the CPU.
        memory: Memory figures in bytes, each the largest of any rank.
    """

    losses: Losses
    busy: float
    cpu_seconds: float
    flags: Flags
    squares: Tensor
    memory: MemoryUse


class Agreement:
    """Sums what ranks know of a step; see Note [one agreed step].

    Args:
        mesh: Mesh of the run.
        norm: Squared gradient norms of this rank.
        device: Device on which ranks sum.
    """

    def __init__(self, mesh: Mesh, norm: GradientNorm, *, device: torch.device) -> None:
        self._mesh, self._norm, self._device = mesh, norm, device
        self._num_ranks = mesh.world.size()
        self._cpu_before = self._cpu_last = time.process_time()

    def sum(self, losses: Losses, busy: float, flags: Flags) -> Agreed:
        """Sum over all ranks, which call this together.

        Args:
            losses: This rank's share of the losses.
            busy: Share of the pipeline's wall time that this rank spent computing.
            flags: What this rank has found out.
        """
        self._cpu_last = time.process_time()
        scalars = [*losses, busy, self._cpu_last - self._cpu_before, *flags]
        values, squares, memory = self._sum_over_ranks(scalars)
        summed, (busy, seconds), told = values[:3], values[3:5], values[5:]
        return Agreed(Losses(*summed), busy, seconds, Flags(*told), squares, memory)

    def end_step(self) -> None:
        """Count CPU time from the last sum on: a step that is run again counts as one."""
        self._cpu_before = self._cpu_last

    def _sum_over_ranks(self, scalars: Sequence[float]) -> tuple[list[float], Tensor, MemoryUse]:
        """Return sums of scalars and squared norms, and of memory the largest of any rank."""
        mine = torch.tensor(MemoryUse.of(self._device).known, dtype=torch.float64)
        memory = torch.zeros(self._num_ranks, len(mine), dtype=torch.float64)
        memory[self._mesh.rank] = mine
        head = torch.cat((torch.tensor(scalars, dtype=torch.float64), memory.flatten()))
        vector = torch.cat((head.to(self._device), self._norm.local_squares(self._device)))
        dist.all_reduce(vector, group=self._mesh.world)
        values, memories, squares = vector.cpu().split(
            [len(scalars), memory.numel(), len(self._norm.sizes)]
        )
        squares = arrived(squares, purpose="squared gradient norms")
        largest = memories.view_as(memory).amax(dim=0)
        return values.tolist(), squares, MemoryUse(*map(int, largest.tolist()))
