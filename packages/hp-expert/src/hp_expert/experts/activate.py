"""The activation of all experts at once, and its gradient: by torch, or on CUDA by Triton.

Shape symbols: N rows, F slots per row, P positions in expert order, H hidden width.
"""

import torch
from torch import Tensor

from hp_expert.batch import ExpertBatch, Places
from hp_expert.experts.activation import Activation, ClampedSwiGLU, SwiGLU
from hp_expert.kernels import fuses, triton_activation
from hp_expert.kernels.triton_activation import Gradients


def activate(pre: tuple[Tensor, Tensor], activation: Activation, places: Places) -> Tensor:
    """Return the activation of gate and up [P, H], in new memory."""
    gate_PH, up_PH = pre
    form = _form_of(activation)
    if form is not None and fuses(gate_PH):
        return triton_activation.activate(gate_PH, up_PH, places.row, form)
    gated_PH = activation.gate(gate_PH)
    return activation.product(gated_PH, up_PH, out=gated_PH)


def activate_backward(
    dh_PH: Tensor,
    pre: tuple[Tensor, Tensor],
    dpre: tuple[Tensor, Tensor],
    activation: Activation,
    *,
    batch: ExpertBatch,
    places: Places,
    extra_P: Tensor | None,
) -> Gradients:
    """Write the gradients of gate and up.

    Args:
        dh_PH: Gradient of the activation without the factor of the routing weight; is overwritten.
        pre: Gate and up [P, H].
        dpre: Memory for the gradients of gate and up.
        activation: Activation to differentiate.
        batch: Batch with the routing weights.
        places: Places of the slots of the batch.
        extra_P: Value to add to the gradient of each position's routing weight; None: nothing.
    """
    form, weights_NF = _form_of(activation), batch.weights
    if form is not None and fuses(dh_PH):
        weights_S = None if weights_NF is None else weights_NF.contiguous()
        at = places.row, places.slot
        return triton_activation.activate_backward(
            dh_PH, pre, dpre, form, at=at, weights_S=weights_S, extra_P=extra_P
        )
    (gate_PH, up_PH), scale_P, grad_P = pre, batch.weight_at(), None
    gated_PH = activation.gate(gate_PH)
    h_PH = activation.product(gated_PH, up_PH)
    if scale_P is not None:
        grad_P = dot(dh_PH, h_PH, scale_P.dtype)
        if extra_P is not None:
            grad_P += extra_P
        dh_PH.mul_(scale_P[:, None])
        h_PH.mul_(scale_P[:, None])
    activation.backward(dh_PH, gate_PH, up_PH, gated_PH, *dpre)
    return Gradients(h_PH, batch.weight_gradient(grad_P))


def dot(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the dot products of the rows of two tensors, computed in `dtype`: [P]."""
    product: Tensor = torch.linalg.vecdot(a.to(dtype), b.to(dtype))
    return product


def _form_of(activation: Activation) -> triton_activation.Form | None:
    """Return an activation as the kernels take it; None: they do not compute it."""
    if type(activation) is SwiGLU:
        return triton_activation.Form()
    if type(activation) is ClampedSwiGLU and activation.limit > 0:
        return triton_activation.Form(activation.limit, activation.alpha)
    return None
