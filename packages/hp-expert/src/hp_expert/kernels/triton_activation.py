"""The activation between two products and its gradient, each in one pass over memory.

With b bytes per element:

| kernel | reads | writes |
|---|---|---|
| `activate` | 2 P * H * b + 8 P | P * H * b |
| `activate_backward` | 3 P * H * b + 20 P | 3 P * H * b + 4 P |
| `zero_idle` | 8 L | the gradients of experts without rows |

The methods of `hp_expert.experts.activation` are the reference.

Shape symbols: P positions, S slots, H hidden width, L local experts.
"""

from functools import partial
from typing import NamedTuple

from torch import Tensor

from hp_expert.kernels.launching import launch_kernel
from hp_expert.kernels.triton_rows import num_blocks, options

_launch = partial(launch_kernel, "triton_activation_kernels")
_ZEROS = 1024
_MOST_PROGRAMS = 32


class Form(NamedTuple):
    """An activation as the kernels take it: g * sigmoid(alpha * g) times u, or clamped times u + 1.

    Attributes:
        limit: Bound of g from above, and of u on both sides, with a factor of u + 1; 0: no bounds,
            and a factor of u.
        alpha: Steepness of the gate.
    """

    limit: float = 0.0
    alpha: float = 1.0

    def constants(self) -> dict[str, float]:
        """Return the constants of the kernels."""
        return {"CLAMPED": self.limit > 0, "LIMIT": self.limit, "ALPHA": self.alpha}


class Gradients(NamedTuple):
    """The results of a backward of the activation, besides the gradients of gate and up.

    Attributes:
        scaled: Activation times the routing weight [P, H].
        weights: Gradient of the routing weight of each slot, in the shape of the weights; 0 for a
            slot without a position. None without weights.
    """

    scaled: Tensor
    weights: Tensor | None


def activate(gate_PH: Tensor, up_PH: Tensor, row_P: Tensor, form: Form) -> Tensor:
    """Return the activation [P, H]; padding, whose row is -1, is left uninitialised.

    Args:
        gate_PH: Gate, whose stride of rows may be larger than their width.
        up_PH: Up, with the strides of the gate.
        row_P: Row of each position.
        form: Activation to compute.
    """
    (num_positions, width), stride = gate_PH.shape, gate_PH.stride(0)
    h_PH = gate_PH.new_empty(num_positions, width)
    chosen = options(width)
    _launch(
        "activate",
        (num_positions, num_blocks(width, chosen)),
        made=(h_PH,),
        given=(gate_PH, up_PH, row_P, width, stride),
        wide=h_PH.dtype,
        constants={**chosen, **form.constants()},
    )
    return h_PH


def activate_backward(
    dh_PH: Tensor,
    pre: tuple[Tensor, Tensor],
    dpre: tuple[Tensor, Tensor],
    form: Form,
    *,
    at: tuple[Tensor, Tensor],
    weights_S: Tensor | None,
    extra_P: Tensor | None = None,
) -> Gradients:
    """Write the gradients of gate and up; padding is left as it is.

    Args:
        dh_PH: Gradient of the activation without the factor of the routing weight.
        pre: Gate and up [P, H], as `activate` takes them.
        dpre: Memory for the gradients of gate and up, with the same strides.
        form: Activation to differentiate.
        at: Row, -1 for padding, and slot of each position.
        weights_S: Routing weight of each slot; None: one.
        extra_P: Value to add to the gradient of each position's routing weight; None: nothing.
    """
    (num_positions, width), stride = dh_PH.shape, pre[0].stride(0)
    scaled_PH = dh_PH.new_empty(num_positions, width)
    grad_S = None if weights_S is None else weights_S.new_zeros(weights_S.shape)
    _launch(
        "activate_backward",
        (num_positions,),
        made=(*dpre, scaled_PH, grad_S),
        given=(dh_PH.contiguous(), *pre, *at, weights_S, extra_P, width, stride),
        wide=dh_PH.dtype,
        constants={**options(width), **form.constants()},
    )
    return Gradients(scaled_PH, grad_S)


def zero_idle(gradient: Tensor, num_rows_L: Tensor) -> None:
    """Zero the gradients of experts without rows, [L, ...] and contiguous, in place."""
    num_experts, size = gradient.shape[0], gradient[0].numel()
    _launch(
        "zero_idle",
        (num_experts, min(-(-size // _ZEROS), _MOST_PROGRAMS)),
        made=(gradient,),
        given=(num_rows_L, size),
        writes=(gradient[:0],),  # in a dry run every expert has rows: nothing is written
        constants={"BLOCK": _ZEROS, "enable_fp_fusion": False},
    )
