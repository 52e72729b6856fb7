"""Gradients of the whole model: summed over the ranks, one norm, one clip."""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_platform import all_gather_json, float64_norms
from hp_trainer.layout.mesh import Mesh
from hp_trainer.layout.parameter import SIDE_BY_SIDE
from hp_trainer.model.parameters import Parameter, collect_gradients


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


@torch.no_grad()
def clip_gradients(parameters: Sequence[Parameter], norm: float, max_norm: float) -> None:
    """Scale all gradients so that the whole model's norm is at most ``max_norm`` (0: never)."""
    if max_norm > 0 and norm > max_norm:
        gradients = [p.local.grad for p in parameters if p.local.grad is not None]
        torch._foreach_mul_(gradients, max_norm / norm)
