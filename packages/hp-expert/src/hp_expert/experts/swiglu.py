"""The arithmetic of experts as one autograd Function.

out[n] = sum over the slots of row n of weight * SwiGLU_e(rows[n]), where
SwiGLU_e(x) = (silu(x @ w1_e^T) * (x @ w3_e^T)) @ w2_e^T (Shazeer 2020, arXiv:2002.05202).

Note [What is kept for backward]. The rows as they arrived, their routing, and the pre-activations
`gate` and `up`. Backward gathers the rows again and recomputes the activation h. No expert output
is kept for the gradient of its routing weight: with d = dout @ w2 that gradient is
<dout, h @ w2^T> = <d, h>, and d is needed in any case.

Shape symbols: N rows, F slots per row, P positions (see `hp_expert.batch`), L local experts,
D width, H hidden width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hp_expert.batch import ExpertBatch
from hp_expert.experts import grouped, loop
from hp_expert.experts.types import Activations, Backend, ExpertWeights, WeightGradients
from hp_expert.experts.weight_gradient import WeightGradient
from hp_platform import wait_tensor


def routed_swiglu(batch: ExpertBatch, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
    """Apply the experts to a batch, in the way that is fastest for its device, dtype and size.

    Differentiable once, with respect to rows, routing weights, w1, w3 and w2. Weights that are
    wider than the rows are cast to their dtype and get gradients in their own.

    Args:
        batch: Rows of any floating dtype, and their routing.
        w1: Gate projections [L, H, D].
        w3: Up projections [L, H, D].
        w2: Down projections [L, D, H].

    Returns:
        [N, D], of the dtype of the rows.

    Raises:
        ValueError: If the rows are not as wide as the weights expect, or of a dtype that is wider
            than theirs or that theirs does not contain.
    """
    batch = batch._replace(rows=autocast(batch.rows))
    _require_fit(batch, w1)
    return routed_swiglu_by(_fastest(batch, w1), batch, ExpertWeights(w1, w3, w2))


def routed_swiglu_by(backend: Backend, batch: ExpertBatch, weights: ExpertWeights) -> Tensor:
    """Apply the experts to a batch in the given way; see `routed_swiglu`."""
    with torch.autocast(batch.rows.device.type, enabled=False):
        out: Tensor = _RoutedSwiGLU.apply(batch.rows, batch.weights, *weights, batch, backend)
    return out


def autocast(x: Tensor) -> Tensor:
    """Cast to what `torch.autocast`, if it is on, wants products to be computed in."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


class _RoutedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  # autograd passes by position
        ctx: Any,
        rows: Tensor,
        slot_weights: Tensor | None,
        w1: Tensor,
        w3: Tensor,
        w2: Tensor,
        batch: ExpertBatch,
        backend: Backend,
    ) -> Tensor:
        batch = batch._replace(rows=rows, weights=slot_weights)
        weights = _cast(ExpertWeights(w1, w3, w2), rows.dtype)
        out, kept = backend.forward(batch, _scale(batch), weights)
        ctx.save_for_backward(rows, slot_weights, batch.order, *kept, w1, w3, w2)
        nothing = rows.new_empty(0)
        ctx.batch = batch._replace(rows=nothing, weights=None, order=nothing)
        ctx.backend, ctx.parameters = backend, (w1, w3, w2)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        rows, slot_weights, order, gate, up, *saved = ctx.saved_tensors
        batch: ExpertBatch = ctx.batch._replace(rows=rows, weights=slot_weights, order=order)
        backend: Backend = ctx.backend
        weights = _cast(ExpertWeights(*saved), rows.dtype)
        counts = batch.host_counts()
        wanted = WeightGradients(
            *(
                # Note [Now or later]; the saved weights may be copies of the parameters.
                WeightGradient(parameter, dtype=rows.dtype, counts=counts, needed=needed)
                for parameter, needed in zip(ctx.parameters, ctx.needs_input_grad[2:5], strict=True)
            )
        )
        grad_out = wait_tensor(grad_out).contiguous()
        with torch.autocast(rows.device.type, enabled=False):
            grads = backend.backward(
                batch, _scale(batch), weights, Activations(gate, up), grad_out, wanted=wanted
            )
        return (
            grads.rows,
            _unscale(grads.scale, batch),
            *(gradient.result() for gradient in wanted),
            None,
            None,
        )


def _scale(batch: ExpertBatch) -> Tensor | None:
    """Routing weight of the slot at each position [P], fp32 or wider."""
    if batch.weights is None:
        return None
    wide = torch.promote_types(batch.weights.dtype, torch.float32)
    return batch.weights.reshape(-1).to(wide).index_select(0, batch.order)


def _unscale(grad_P: Tensor | None, batch: ExpertBatch) -> Tensor | None:
    """Gradient of each slot's routing weight [N, F]."""
    if grad_P is None or batch.weights is None:
        return None
    grad_S = grad_P.new_zeros(batch.num_slots).scatter_(0, batch.order, grad_P)
    return grad_S.view(batch.weights.shape).to(batch.weights.dtype)


def _cast(weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    return ExpertWeights(*(weight.to(dtype) for weight in weights))


def _fastest(batch: ExpertBatch, w1: Tensor) -> Backend:
    """`grouped_mm` wants CUDA, bf16 and strides of a multiple of 16 bytes; all else is a loop."""
    rows, (_, H, D) = batch.rows, w1.shape
    fits = rows.is_cuda and rows.dtype == torch.bfloat16 and H % 8 == 0 and D % 8 == 0
    return grouped if fits and batch.order.numel() > 0 else loop


def _require_fit(batch: ExpertBatch, w1: Tensor) -> None:
    rows = batch.rows
    if rows.ndim != 2 or rows.shape[1] != w1.shape[2]:
        raise ValueError(f"rows ({tuple(rows.shape)}) must be [N, dim ({w1.shape[2]})]")
    if torch.promote_types(rows.dtype, w1.dtype) != w1.dtype:
        raise ValueError(
            f"dtype of rows ({rows.dtype}) must equal that of the expert weights ({w1.dtype}) or "
            "be contained in it"
        )
    num_counts = batch.num_tokens_per_expert.shape[0]
    if num_counts != w1.shape[0]:
        raise ValueError(
            f"len(counts) ({num_counts}) must equal the number of local experts ({w1.shape[0]})"
        )
