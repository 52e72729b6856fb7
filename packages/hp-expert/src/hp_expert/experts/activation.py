"""Gated activations between the projections of experts, and their gradients.

Of all experts at once they are computed by torch, or on CUDA by Triton.

Shape symbols: R or N rows, F slots per row, P positions in expert order, H hidden width.
"""

from dataclasses import dataclass
from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hp_expert.batch import ExpertBatch, Places
from hp_expert.kernels import fuses, triton_activation
from hp_expert.kernels.triton_activation import Gradients


class Activation(Protocol):
    """A gated activation.

    Every activation here is gate(g) times a function of u. Backward needs gate(g) twice, for the
    product and for the gradient of u, so it is computed once and passed on. All gradients may be
    written into the memory of their inputs.
    """

    def gate(self, gate: Tensor) -> Tensor:
        """Return the gating factor [R, H] in new memory."""

    def product(self, gated: Tensor, up: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the factor times the function of `up` [R, H]; `out` may be `gated`."""

    def backward(  # noqa: PLR0917  # four inputs and memory for two results
        self, dh: Tensor, gate: Tensor, up: Tensor, gated: Tensor, dgate: Tensor, dup: Tensor
    ) -> None:
        """Write the gradients of `gate` and `up`.

        Args:
            dh: Gradient of the product; is overwritten.
            gate: Same as in the method `gate`.
            up: Same as in `product`.
            gated: Result of the method `gate`.
            dgate: Memory for the gradient of `gate`; may be `dh`.
            dup: Memory for the gradient of `up`; may be `gated`.
        """


def require_activation(activation: object) -> None:
    """Raise ValueError for an object without the methods of an `Activation`."""
    methods = ("gate", "product", "backward")
    if not all(callable(getattr(activation, name, None)) for name in methods):
        raise ValueError(
            f"activation ({activation!r}) must be an Activation, an object with gate, product and "
            "backward such as SwiGLU() or ClampedSwiGLU(); other experts end in "
            "ExpertBatch.sum_over_slots"
        )


@dataclass(frozen=True, slots=True)
class SwiGLU:
    """silu(gate) * up (Shazeer 2020, arXiv:2002.05202)."""

    def gate(self, gate: Tensor) -> Tensor:
        """See `Activation.gate`."""
        return F.silu(gate)

    def product(self, gated: Tensor, up: Tensor, *, out: Tensor | None = None) -> Tensor:
        """See `Activation.product`."""
        return torch.mul(gated, up, out=out)

    def backward(  # noqa: PLR0917  # as the protocol has it
        self, dh: Tensor, gate: Tensor, up: Tensor, gated: Tensor, dgate: Tensor, dup: Tensor
    ) -> None:
        """See `Activation.backward`."""
        torch.mul(gated, dh, out=dup)
        torch.ops.aten.silu_backward.grad_input(dh.mul_(up), gate, grad_input=dgate)


SWIGLU: Final = SwiGLU()


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """g * sigmoid(alpha * g) * (u + 1), with g clamped to `limit` and u to both limits (gpt-oss).

    Attributes:
        limit: Bound of g from above, and of u on both sides; gradients beyond it are zero.
        alpha: Steepness of the gate.
    """

    limit: float = 7.0
    alpha: float = 1.702

    def gate(self, gate: Tensor) -> Tensor:
        """See `Activation.gate`."""
        clamped = gate.clamp(max=self.limit)
        return (clamped * self.alpha).sigmoid_().mul_(clamped)

    def product(self, gated: Tensor, up: Tensor, *, out: Tensor | None = None) -> Tensor:
        """See `Activation.product`."""
        return torch.mul(gated, self._plus_one(up), out=out)

    def backward(  # noqa: PLR0917  # as the protocol has it
        self, dh: Tensor, gate: Tensor, up: Tensor, gated: Tensor, dgate: Tensor, dup: Tensor
    ) -> None:
        """See `Activation.backward`."""
        torch.mul(gated, dh, out=dup)
        dup.masked_fill_(up.abs() > self.limit, 0.0)
        dh.mul_(self._plus_one(up))
        clamped = gate.clamp(max=self.limit)
        s = (clamped * self.alpha).sigmoid_()
        # d(g * s(alpha g))/dg = s + alpha * g * s * (1 - s)
        slope = torch.addcmul(s, clamped.mul_(self.alpha).mul_(s), 1 - s)
        torch.mul(dh, slope, out=dgate)
        dgate.masked_fill_(gate > self.limit, 0.0)

    def _plus_one(self, up: Tensor) -> Tensor:
        return up.clamp(-self.limit, self.limit).add_(1.0)


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
