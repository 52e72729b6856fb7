"""Cross-entropy of what the output matrix gives, without all logits at once.

Where ranks share out the vocabulary, each has the logits of its rows. They sum two numbers of every
token, whatever the size of the tiles; see Note [Logits in tiles] in `hp_trainer.layout.vocabulary`.
Backward computes the logits again, tile by tile, from what every tile is normalised by.

Sources: online softmax, Milakov and Gimelshein, 2018 (arXiv:1805.02867); over a cut vocabulary,
Shoeybi et al., 2019 (arXiv:1909.08053).

Shape symbols: T tokens, t of them in a tile, D model width, v rows of the output matrix of this
rank, r of them in a tile.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_platform import doing, submit_weight_grad
from hp_trainer.layout.vocabulary import LOSS, WIDE_BYTES, LogitTile, logit_tile
from hp_trainer.model.layers import WeightCasts, cast_linear


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    casts: WeightCasts | None = None,
    is_split: bool = True,
    first: int = 0,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Sum of the cross-entropy of all tokens whose target is not negative, a scalar.

    Args:
        x: What the output matrix gets, [T, D].
        weight: This rank's rows of the output matrix, [v, D], as wide as ``x`` or wider.
        targets: int64 [T].
        casts: See `hp_trainer.model.layers.cast_linear`.
        is_split: Whether some schedule may compute the weight gradient later.
        first: First token of the vocabulary that is here.
        group: Ranks that have the other rows; all of them get the same loss, and must call. None:
            there are none.

    Returns:
        The sum in fp32 or wider.
    """
    tile = logit_tile(x.shape[0], weight.shape[0], size=x.dtype.itemsize)
    if tile is None:
        is_plain = not is_split and x.dtype == weight.dtype
        logits = F.linear(x, weight) if is_plain else cast_linear(x, weight, casts=casts)
        return cross_entropy(logits, targets, first=first, group=group)
    with doing(LOSS):
        return tiled_cross_entropy(
            x, weight, targets, tile=tile, casts=casts, first=first, group=group
        )


def tiled_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    tile: LogitTile,
    casts: WeightCasts | None = None,
    first: int = 0,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Compute `linear_cross_entropy` with one tile of logits in memory, however many there are.

    Args:
        x: [T, D].
        weight: [v, D].
        targets: int64 [T].
        tile: Shape of the tiles.
        casts: Same as in `linear_cross_entropy`.
        first: Likewise.
        group: Likewise.
    """
    cast = None if casts is None else casts.of(weight, x.dtype)
    loss: Tensor = _InTiles.apply(x, weight, targets, _Cut(tile, first, group, cast))
    return loss


def cross_entropy(
    logits: Tensor, targets: Tensor, *, first: int = 0, group: ProcessGroup | None = None
) -> Tensor:
    """Sum of the cross-entropy of all tokens whose target is not negative, a scalar.

    Args:
        logits: Logits of this rank's part of the vocabulary, [T, v]; they are made fp32 or wider.
        targets: int64 [T].
        first: Token of the first logit.
        group: Ranks that have the other parts; all of them get the same loss, and must call. None:
            there are none.
    """
    if logits.dtype.itemsize < WIDE_BYTES:
        logits = logits.float()
    if group is None or group.size() == 1:
        return F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
    loss: Tensor = _CrossEntropy.apply(logits, targets, first, group)
    return loss


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross-entropy, a scalar, by what the last stage of a model returned.

    Args:
        output: The loss itself, or logits [B, S, V].
        targets: int64 [B, S].
    """
    if not output.ndim:
        return output
    return cross_entropy(output.flatten(0, 1), targets.flatten())


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, first: int, group: ProcessGroup
    ) -> Tensor:
        largest_T = logits.amax(dim=1)
        dist.all_reduce(largest_T, dist.ReduceOp.MAX, group=group)
        share_Tv = (logits - largest_T[:, None]).exp_()
        aims = _Aims.of(targets, range(first, first + logits.shape[1]))
        sums = torch.stack((share_Tv.sum(dim=1), aims.logits_of(logits)))
        dist.all_reduce(sums, group=group)
        share_Tv /= sums[0, :, None]
        ctx.save_for_backward(share_Tv, targets)
        ctx.first = first
        return (sums[0].log() + largest_T - sums[1]).where(targets >= 0, 0).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        share_Tv, targets = ctx.saved_tensors
        scale_T = grad * (targets >= 0)
        grad_Tv = share_Tv * scale_T[:, None]
        aims = _Aims.of(targets, range(ctx.first, ctx.first + share_Tv.shape[1]))
        aims.subtract(grad_Tv, scale_T)
        return grad_Tv, None, None, None


@dataclass(frozen=True, slots=True)
class _Aims:
    """The columns of the targets of tokens among some logits.

    Attributes:
        column: Columns of the targets, int64 [T]; of those that are not among them, some other.
        is_here: Whether a target is among them, bool [T].
    """

    column: Tensor
    is_here: Tensor

    @classmethod
    def of(cls, targets: Tensor, rows: range) -> "_Aims":
        """Return the targets [T] among the logits of some tokens of the vocabulary."""
        place = targets - rows.start
        column = place.clamp(0, len(rows) - 1)
        return cls(column, place == column)

    def logits_of(self, logits: Tensor) -> Tensor:
        """Return the logits [T] of the targets among [T, v]; 0 where a target is not among them."""
        return logits.gather(1, self.column[:, None])[:, 0].where(self.is_here, 0)

    def subtract(self, grad: Tensor, scale_T: Tensor) -> None:
        """Take a number [T] from what [T, v] has at the targets."""
        grad.scatter_add_(1, self.column[:, None], (scale_T * self.is_here).neg_()[:, None])


@dataclass(frozen=True, slots=True)
class _Cut:
    """A rank's part of the vocabulary, and the tiles in which the loss reads it.

    Attributes:
        tile: Shape of the tiles of logits.
        first: Token of the first row of the output matrix.
        group: Ranks that have the other rows.
        cast: The output matrix in the dtype of its input, if it was made.
    """

    tile: LogitTile
    first: int
    group: ProcessGroup | None
    cast: Tensor | None

    def aims(self, targets: Tensor, rows: slice) -> _Aims:
        """Return where targets [t] are in a tile."""
        return _Aims.of(targets, range(self.first + rows.start, self.first + rows.stop))


class _InTiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, cut: _Cut) -> Tensor:
        used = weight if cut.cast is None else cut.cast
        wide = torch.promote_types(x.dtype, torch.float32)
        largest_T = x.new_full((len(x),), -torch.inf, dtype=wide)
        sums = x.new_zeros((2, len(x)), dtype=wide)  # of exponentials; the logit of the target
        for tokens in _runs(x, cut.tile.tokens):
            largest_t, (sum_t, aim_t) = largest_T[tokens], sums[:, tokens]
            for rows in _runs(used, cut.tile.rows):
                aims = cut.aims(targets[tokens], rows)
                _add_tile(_logits(x[tokens], used[rows]), aims, largest_t, sum_t, aim_t)
        if cut.group is not None and cut.group.size() > 1:
            mine_T = largest_T.clone()
            dist.all_reduce(largest_T, dist.ReduceOp.MAX, group=cut.group)
            sums[0] *= mine_T.sub_(largest_T).exp_()
            dist.all_reduce(sums, group=cut.group)
        norm_T = sums[0].log() + largest_T
        ctx.save_for_backward(x, used, targets, norm_T)
        ctx.weight, ctx.cut = weight, cut
        return (norm_T - sums[1]).where(targets >= 0, 0).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, used, targets, norm_T = (tensor.detach() for tensor in ctx.saved_tensors)
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        gradients = _Gradients(
            x=x,
            used=used,
            targets=targets,
            norm=norm_T,
            scale=grad.detach() * (targets >= 0),
            cut=ctx.cut,
            needs_x=needs_x,
        )
        weight_grad = None
        if needs_weight:
            weight_grad = submit_weight_grad(
                ctx.weight, partial(gradients.of_weight, ctx.weight.dtype)
            )
        return gradients.of_x(), weight_grad, None, None


def _add_tile(
    logits_tr: Tensor, aims: _Aims, largest_t: Tensor, sum_t: Tensor, aim_t: Tensor
) -> None:
    """Add to the sums of exponentials, and to the logits of targets; writes all but the aims."""
    aim_t += aims.logits_of(logits_tr)
    before_t = largest_t.clone()
    torch.maximum(before_t, logits_tr.amax(dim=1), out=largest_t)
    sum_t *= before_t.sub_(largest_t).exp_()
    sum_t += logits_tr.sub_(largest_t[:, None]).exp_().sum(dim=1)


@dataclass(slots=True, kw_only=True)
class _Gradients:
    """Both gradients of a loss in tiles: of one pass where nobody puts off that of the weight.

    Attributes:
        x: [T, D].
        used: The output matrix in the dtype of the products, [v, D].
        targets: int64 [T].
        norm: Log-sum-exp of all logits of a token, [T].
        scale: Gradient of the loss of each token, [T].
        cut: Part of the vocabulary.
        needs_x: Whether the gradient of the input is still to be computed.
        found: Gradient of the input, [T, D]; None: not computed yet.
    """

    x: Tensor
    used: Tensor
    targets: Tensor
    norm: Tensor
    scale: Tensor
    cut: _Cut
    needs_x: bool
    found: Tensor | None = None

    def of_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight gradient [v, D]; compute that of the input, too, if it is missing."""
        grad = self.x.new_zeros(self.used.shape, dtype=dtype)
        self._run(grad)
        return grad

    def of_x(self) -> Tensor | None:
        """Return the input gradient [T, D], if it is needed."""
        if self.needs_x:
            self._run(None)
        found, self.found = self.found, None
        return found

    def _run(self, grad_weight: Tensor | None) -> None:
        x, tile, wide = self.x, self.cut.tile, self.norm.dtype
        grad_x = torch.empty_like(x) if self.needs_x else None
        with doing(LOSS):
            for tokens in _runs(x, tile.tokens):
                sum_tD = torch.zeros_like(x[tokens], dtype=wide)
                for rows in _runs(self.used, tile.rows):
                    self._add_tile(tokens, rows, grad_weight, None if grad_x is None else sum_tD)
                if grad_x is not None:
                    grad_x[tokens] = sum_tD
        if grad_x is not None:
            self.found, self.needs_x = grad_x, False

    def _add_tile(
        self, tokens: slice, rows: slice, grad_weight: Tensor | None, grad_x: Tensor | None
    ) -> None:
        """Add what a tile gives to both gradients; when it returns, the tile is gone."""
        grad_tr = self._of_logits(tokens, rows)
        if grad_weight is not None:
            grad_weight[rows] += grad_tr.t() @ self.x[tokens]
        if grad_x is not None:
            grad_x += grad_tr @ self.used[rows].to(self.x.dtype)

    def _of_logits(self, tokens: slice, rows: slice) -> Tensor:
        """Return the gradient of logits [t, r] in the dtype of the input."""
        grad_tr = _logits(self.x[tokens], self.used[rows])
        grad_tr.sub_(self.norm[tokens, None]).exp_().mul_(self.scale[tokens, None])
        self.cut.aims(self.targets[tokens], rows).subtract(grad_tr, self.scale[tokens])
        return grad_tr.to(self.x.dtype)


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply [t, D] and [r, D] to [t, r], fp32 or wider."""
    logits = F.linear(x, weight.to(x.dtype))
    return logits if logits.dtype.itemsize >= WIDE_BYTES else logits.float()


def _runs(x: Tensor, most: int) -> Iterator[slice]:
    """Return dim 0 of a tensor in runs of so many rows; the last has fewer."""
    return (slice(start, min(start + most, len(x))) for start in range(0, len(x), most))
