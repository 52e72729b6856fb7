"""The small layers of a decoder-only transformer.

Shape symbols: B sequences, S positions, T tokens, D model width.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_base.seeds import derive_seed
from hp_platform import linear, submit_weight_grad
from hp_trainer.layout.parameter import ParameterSpec
from hp_trainer.model.parameters import declare
from hp_trainer.model.randomness import uniform


class WeightCasts:
    """Weights in the dtype that is computed in, each made once for all microbatches of a step.

    Whoever has one clears it when weights change, or are no longer to be held.
    """

    def __init__(self) -> None:
        self._made: dict[int, Tensor] = {}

    def of(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the weight in a dtype; None where it is in it already."""
        if weight.dtype == dtype:
            return None
        found = self._made.get(id(weight))
        if found is None:
            # Two threads may both come here: they make the same.
            found = self._made[id(weight)] = weight.detach().to(dtype)
        return found

    @property
    def made(self) -> list[Tensor]:
        """Return all of them."""
        return [*self._made.values()]

    def clear(self) -> None:
        """Let go of all of them."""
        self._made.clear()


def cast_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, casts: WeightCasts | None
) -> Tensor:
    """Multiply as `torch.nn.functional.linear`, in the dtype of ``x``; gradients stay as wide.

    Args:
        x: [..., in_features].
        weight: [out_features, in_features], as wide as ``x`` or wider.
        bias: [out_features], likewise.
        casts: Where to find the weight; None: it is cast here, and in backward again.
    """
    if torch.compiler.is_compiling():
        return linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    if casts is None:
        return linear(x, weight, bias, dtype=x.dtype)
    return linear(x, weight, bias, cast=casts.of(weight, x.dtype))


class Lender(nn.Module):
    """A module whose weight is also read by others, all through `lend`.

    So FSDP, whose hooks are around calls, can gather it for as long as it is read.
    """

    weight: Tensor

    def lend(self, reader: Callable[..., Tensor], x: Tensor, *others: Any) -> Tensor:
        """Call a function with a tensor, the weight, and other arguments.

        Args:
            reader: Returns what has a gradient.
            x: Its gradient comes through this call.
            *others: Further arguments.
        """
        return reader(x, self.weight, *others)


class Linear(Lender):
    """A matrix whose weight gradient can be computed later than its input gradient.

    Parameters may be kept wider than the activations (fp32 masters under bf16 compute); they are
    then cast at use, and their gradients arrive in the parameter's own dtype.

    Attributes:
        finish: What the product goes through before the bias is added: where the matrix is cut
            over ranks, the sum over them.
        casts: Where the weight is found once it was cast; None: it is cast at every use.
        is_split: Whether some schedule may compute the weight gradient later; what lets it costs
            some CPU time in every call.

    Args:
        in_features: Width of the input.
        out_features: Width of the output.
        bias: Whether a bias is added.
        tp_dim: Dim of the weight that tensor-parallel ranks share out: 0 cuts the output, 1 the
            input; None: each has all of it.
        is_residual: Whether the output is added to the residual stream.
        published: See `hp_trainer.model.declare`.
    """

    weight: Tensor  # [out_features, in_features]
    bias: Tensor | None  # [out_features]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        tp_dim: int | None = None,
        is_residual: bool = False,
        published: str | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features)) if bias else None)
        declare(
            self,
            published,
            weight=ParameterSpec(tp_dim=tp_dim, is_residual=is_residual),
            bias=ParameterSpec("bias", tp_dim=0 if tp_dim == 0 else None),
        )
        self.finish: Callable[[Tensor], Tensor] | None = None
        self.casts: WeightCasts | None = None
        self.is_split = True

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``, in the dtype of ``x``."""
        if not self.is_split and self.weight.dtype == x.dtype:
            product = F.linear
        else:
            product = partial(cast_linear, casts=self.casts)
        if self.finish is None:
            return product(x, self.weight, self.bias)
        y = self.finish(product(x, self.weight))
        return y if self.bias is None else y + self.bias.to(y.dtype)


class Embedding(nn.Embedding, Lender):
    """A table whose gradient can be computed later, as that of a `Linear`.

    Where it is the output matrix too, both gradients have to come in the order of one backward, in
    every schedule: sums in another order are other numbers.

    Attributes:
        is_split: Same as of `Linear`.

    Args:
        num_embeddings: Rows, one for each token of the vocabulary.
        embedding_dim: D.
        device: Device of the table.
        dtype: Dtype of the table.
        published: See `hp_trainer.model.declare`.
    """

    is_split = True

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        published: str | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, device=device, dtype=dtype)
        declare(self, published, weight=ParameterSpec(tp_dim=0, is_table=True))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in the base class
        """Map token ids int64 [...] to [..., D]."""
        if not self.is_split or torch.compiler.is_compiling():
            return F.embedding(input, self.weight)
        rows: Tensor = _Lookup.apply(self.weight, input)
        return rows


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        (ids,) = ctx.saved_tensors
        num_rows = ctx.weight.shape[0]
        later = partial(
            torch.ops.aten.embedding_dense_backward, grad.detach(), ids, num_rows, -1, False
        )
        return submit_weight_grad(ctx.weight, later), None


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (Zhang and Sennrich, 2019), statistics in fp32 or wider."""

    weight: Tensor  # [D]

    def __init__(self, dim: int, *, eps: float, published: str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        declare(self, published, weight=ParameterSpec("norm"))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` normalised over its last dim, in its shape and dtype."""
        run: Callable[..., Tensor] = _rms_norm
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            run = _RMSNormOnCPU.apply
        elif x.dtype.itemsize < torch.float32.itemsize and not torch.compiler.is_compiling():
            run = _RMSNormAgain.apply
        return run(x, self.weight, self.eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps).to(x.dtype)


class _RMSNormAgain(torch.autograd.Function):
    """Runs again in backward, so that what is kept of a narrow ``x`` is itself, not a wide copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.eps = eps
        ctx.save_for_backward(x, weight)
        return _rms_norm(x, weight, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            y = _rms_norm(x, weight, ctx.eps)
        grad_x, grad_weight = torch.autograd.grad(y, (x, weight), grad)
        return grad_x, grad_weight, None


class _RMSNormOnCPU(torch.autograd.Function):
    """For the CPU, where torch has no kernel of its own and takes twice as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x_TD = x.reshape(-1, x.shape[-1])
        wide_TD = x_TD.to(torch.promote_types(x.dtype, torch.float32))
        norm_T1 = torch.linalg.vector_norm(wide_TD, dim=-1, keepdim=True)
        scale_T1 = norm_T1.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x_TD, scale_T1, weight)
        y: Tensor = (wide_TD * scale_T1).mul_(weight).to(x.dtype).view(x.shape)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x_TD, scale_T1, weight = ctx.saved_tensors
        grad_TD = grad.reshape(x_TD.shape).to(scale_T1.dtype)
        unit_TD = x_TD.to(scale_T1.dtype) * scale_T1
        share_TD = grad_TD * unit_TD
        mean_T1 = (share_TD @ weight.to(scale_T1.dtype)).div_(x_TD.shape[1]).unsqueeze(1)
        grad_x_TD = torch.addcmul(grad_TD * weight, unit_TD, mean_T1, value=-1).mul_(scale_T1)
        return grad_x_TD.to(x_TD.dtype).view(grad.shape), share_TD.sum(0).to(weight.dtype), None


class DropoutKey(NamedTuple):
    """The key of dropout: a microbatch drops the same activations in every layout."""

    seed: int
    step: int
    sequence_index: Tensor  # int64 [B], global; [B, S] where positions are of several
    positions: Tensor  # int64 [S], in their sequence


def dropout(x: Tensor, rate: float, key: DropoutKey | None, layer: str) -> Tensor:
    """Zero a share of the activations and scale up the rest.

    Args:
        x: [B, S, D].
        rate: Share to zero, in [0, 1).
        key: None when not training.
        layer: Global name of the place, part of the random key.
    """
    if rate == 0.0 or key is None:
        return x
    purpose = derive_seed(key.seed, "dropout", key.step, layer)
    kept = uniform(purpose, key.sequence_index, key.positions, x.shape[2]) >= rate
    return x * kept.to(x.dtype) / (1.0 - rate)


class FeedForward(nn.Module):
    """Gated feed-forward layer (Shazeer, 2020): ``w2(silu(w1 x) * w3 x)``.

    Args:
        dim: D.
        hidden: Hidden width.
        is_cut: Whether tensor-parallel ranks share out the hidden width.
        published: See `hp_trainer.model.declare`.
    """

    def __init__(self, dim: int, hidden: int, *, is_cut: bool, published: str) -> None:
        super().__init__()
        columns, rows = (0, 1) if is_cut else (None, None)
        self.w1 = Linear(dim, hidden, tp_dim=columns, published="gate_proj")
        self.w3 = Linear(dim, hidden, tp_dim=columns, published="up_proj")
        self.w2 = Linear(hidden, dim, tp_dim=rows, is_residual=True, published="down_proj")
        declare(self, published)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]."""
        y: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y
