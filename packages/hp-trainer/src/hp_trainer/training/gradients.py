"""Gradients of the whole model: summed over the ranks, one norm, and what all ranks agree on.

Note [one agreed step]: whatever one rank learns on its own (a stop was requested, a gradient is
not finite) goes into the vector that all ranks sum at the end of every step, so that all of them
act on it at the same step. No rank ever decides alone.

Note [skipped step]: a step whose loss or gradient norm is not finite changes nothing but the
position of the run. Its gradients and the loads of its routers are dropped: weights, Adam's
moments, Adam's count of updates and correction biases are bit for bit what they were. The step is
counted, its sequences are not read again, and the learning rate goes on. So the number of updates
is the number of steps minus that of skipped ones, and both are saved. See also
docs/how-to/stop-and-resume.md.
"""

import math
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_base.errors import NumericsError
from hp_platform import all_gather_json, float64_norms
from hp_platform.dry_device import arrived
from hp_trainer.config import TrainConfig
from hp_trainer.layout.mesh import Mesh
from hp_trainer.layout.parameter import SIDE_BY_SIDE
from hp_trainer.model.parameters import Parameter, collect_gradients
from hp_trainer.training.metrics import MemoryUse


def reduce_gradients(parameters: Sequence[Parameter], mesh: Mesh) -> list[Tensor]:
    """Sum every gradient over the ranks that hold the same values, into ``local.grad``.

    Losses are already divided by global counts, so sums are all there is. Gradients of one dtype
    over the same groups are summed laid side by side, `SIDE_BY_SIDE` bytes at once; one that is as
    large by itself is summed where it is.

    Returns:
        Norm of each of these on this rank before it was summed: scalars in fp64, on the device.
    """
    collect_gradients(parameters)
    norms: list[Tensor] = []
    buckets: dict[tuple[tuple[ProcessGroup, ...], torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.local.grad
        assert gradient is not None
        over = tuple(map(mesh.groups.__getitem__, parameter.unsummed))
        if parameter.tied_ranks is not None:
            over = (*over, parameter.tied_ranks)
        if over:
            buckets.setdefault((over, gradient.dtype), []).append(gradient)
    # All ranks of a group hold the same parameters in the same order, so buckets come in one order.
    for (groups, _), gradients in buckets.items():
        for part in _side_by_side(gradients):
            flat = part[0]
            if len(part) > 1 or not flat.is_contiguous():
                flat = torch.cat([gradient.reshape(-1) for gradient in part])
            norms += float64_norms([flat])
            for group in groups:
                dist.all_reduce(flat, group=group)
            if flat is not part[0]:
                parts = flat.split([gradient.numel() for gradient in part])
                summed = [piece.view_as(to) for piece, to in zip(parts, part, strict=True)]
                torch._foreach_copy_(part, summed)
                del parts, summed
            del flat  # before the next one is made
    return norms


def _side_by_side(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group gradients in order, each group of at most `SIDE_BY_SIDE` bytes or of one."""
    found: list[list[Tensor]] = []
    room = 0
    for gradient in gradients:
        room -= gradient.nbytes
        if room < 0:
            found.append([])
            room = SIDE_BY_SIDE - gradient.nbytes
        found[-1].append(gradient)
    return found


class GradientNorm:
    """Squared gradient norms by parameter and expert.

    The norm is summed in fp64 over (parameter name, expert) entries in one fixed order. What of an
    entry is here is computed by one of the ranks that hold it, and every rank adds its part of the
    entry or zero, so that the result does not depend on the layout beyond the rounding of the
    gradients themselves and of sums of squares in fp64.

    All ranks construct it together: they tell each other the names they hold.

    Args:
        parameters: This rank's.
        mesh: Decides which rank speaks for what.
        control: Group over all ranks for objects.

    Attributes:
        sizes: Entry name -> number of elements, over all ranks, sorted by name. An expert's entry
            ends in its index, ``layers.0.moe.experts.w1[3]``.
    """

    def __init__(
        self, parameters: Iterable[Parameter], mesh: Mesh, *, control: dist.ProcessGroup
    ) -> None:
        self._spoken: list[tuple[Tensor, int]] = []
        spoken: list[str] = []
        mine: dict[str, int] = {}
        for parameter in parameters:
            names = _entry_names(parameter)
            size = math.prod(parameter.shape[1:] if parameter.spec.is_expert else parameter.shape)
            mine |= dict.fromkeys(names, size)
            is_first = parameter.tied_ranks is None or parameter.tied_ranks.rank() == 0
            speaks = is_first and all(mesh.index(group) == 0 for group in parameter.replicas)
            if not speaks or not parameter.local.numel():
                continue
            self._spoken.append((parameter.local, len(names)))
            spoken += names
        everyone = all_gather_json(mine, of=dict[str, int], group=control)
        self.sizes = dict(sorted({k: v for rank in everyone for k, v in rank.items()}.items()))
        position = {name: i for i, name in enumerate(self.sizes)}
        self._positions = torch.tensor([position[name] for name in spoken], dtype=torch.int64)

    def local_squares(self, device: torch.device) -> Tensor:
        """Return this rank's squares, zeros elsewhere: fp64 [entries], to be summed over ranks."""
        squares = torch.zeros(len(self.sizes), dtype=torch.float64, device=device)
        if not self._positions.numel():
            return squares
        # A norm has the same bits alone and in a list.
        norms = float64_norms(
            [
                row
                for tensor, rows in self._spoken
                if tensor.grad is not None
                for row in tensor.grad.reshape(rows, -1).unbind()
            ]
        )
        # One write: each would cost a copy of its positions, for which a GPU is waited for.
        self._positions = self._positions.to(device)
        squares[self._positions] = torch.stack(norms).square()
        return squares

    def not_finite(self, squares: Tensor) -> list[str]:
        """Return the names of the entries that are not finite."""
        values = zip(self.sizes, squares.tolist(), strict=True)
        return [name for name, value in values if not math.isfinite(value)]


def _entry_names(parameter: Parameter) -> list[str]:
    if parameter.experts is None:
        return [parameter.name]
    return [f"{parameter.name}[{expert}]" for expert in parameter.experts]


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
        # Of memory the largest of any rank: each writes its own, and a sum brings them together.
        mine = torch.tensor(MemoryUse.of(self._device).known, dtype=torch.float64)
        memory = torch.zeros(self._mesh.world.size(), len(mine), dtype=torch.float64)
        memory[self._mesh.rank] = mine
        head = torch.cat((torch.tensor(scalars, dtype=torch.float64), memory.flatten()))
        vector = torch.cat((head.to(self._device), self._norm.local_squares(self._device)))
        dist.all_reduce(vector, group=self._mesh.world)
        sizes = [len(scalars), memory.numel(), len(self._norm.sizes)]
        values, memories, squares = vector.cpu().split(sizes)
        largest = memories.view_as(memory).amax(dim=0)
        summed = values.tolist()
        return Agreed(
            losses=Losses(*summed[:3]),
            busy=summed[3],
            cpu_seconds=summed[4],
            flags=Flags(*summed[5:]),
            squares=arrived(squares, purpose="squared gradient norms"),
            memory=MemoryUse(*map(int, largest.tolist())),
        )

    def end_step(self) -> None:
        """Count CPU time from the last sum on: a step that is run again counts as one."""
        self._cpu_before = self._cpu_last


@dataclass
class Skips:
    """Steps that changed nothing; see Note [skipped step].

    Attributes:
        total: Skipped steps of the whole run.
        in_a_row: Skipped steps in a row, up to now.
    """

    total: int = 0
    in_a_row: int = 0

    def done(self) -> None:
        """Note that a step was not skipped."""
        self.in_a_row = 0

    def add(self, problem: str, config: TrainConfig) -> None:
        """Count a step that is to be skipped.

        Args:
            problem: Step and what is wrong with it; the same on all ranks.
            config: Says whether steps are skipped, and how many.

        Raises:
            NumericsError: When it must not be skipped.
        """
        if config.not_finite == "stop":
            raise NumericsError(problem)
        if self.in_a_row == config.max_skipped_steps:
            raise NumericsError(f"{problem}, after {self.in_a_row} skipped steps in a row")
        self.total += 1
        self.in_a_row += 1


def describe_not_finite(
    *,
    loss: float,
    share: float,
    bad: Sequence[str],
    before: Sequence[Tensor],
    parameters: Iterable[Parameter],
    group: ProcessGroup,
) -> str:
    """Name the parameter and the ranks where a value is not finite. All ranks call together.

    A value that is not finite spreads: through sums to the ranks that hold the same parameter,
    through backward to all layers before. So of several parameters the one nearest to the output is
    named, and the ranks are those on which it was so before gradients were summed over copies.

    Args:
        loss: Loss of the whole step.
        share: This rank's part of it.
        bad: Entries of the gradient norm that are not finite, the same on all ranks.
        before: Norms of what this rank gave to sums over copies.
        parameters: This rank's, with their gradients.
        group: CPU group.

    Returns:
        A clause for a message, the same on all ranks.
    """
    mine = not math.isfinite(share)
    if math.isfinite(loss):
        alone = [p.local.grad for p in parameters if not p.has_copies and p.local.grad is not None]
        mine = not all(bool(part.isfinite().all()) for part in (*before, *alone))
    everyone = all_gather_json(mine, of=bool, group=group)
    ranks = [str(rank) for rank, is_source in enumerate(everyone) if is_source]
    source = f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}" if ranks else ""
    if not math.isfinite(loss):
        return f"the loss ({loss}) is not finite{source}"
    if not bad:  # finite one by one, infinite in sum
        return "the norm of the gradients is not finite"
    more = f" and of {len(bad) - 1} more" if len(bad) > 1 else ""
    return f"the gradient of {_nearest_to_output(bad)}{more} is not finite{source}"


def _nearest_to_output(names: Sequence[str]) -> str:
    def depth(name: str) -> tuple[int, list[int], str]:
        place = {"embedding": 0, "layers": 1}.get(name.partition(".")[0], 2)
        return place, [int(number) for number in re.findall(r"\.(\d+)\.", name)], name

    return max(names, key=depth)
