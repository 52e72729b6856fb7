"""All experts in one product: `torch.nn.functional.grouped_mm`, for CUDA and bf16.

Its traps, which shape this file: offsets are int32 and nobody checks them; strides are multiples of
16 bytes; rows after the last offset are uninitialised memory; gradients must not be expanded; there
is no fp64. Offsets stay on the device: nothing here waits for it.

Shape symbols: N rows, F slots per row, P positions in expert order, L local experts,
H hidden width, D width, K and M the dims of a product.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hp_expert.batch import ExpertBatch
from hp_expert.experts.types import ExpertWeights, InputGradients, WeightGradients
from hp_expert.kernels import kernels_for


class GroupedProducts:
    """The products of rows with their expert's matrix; override them for a lower precision.

    `GroupedExperts.products` takes an object of such a class.

    Rows are in expert order; `ends` has the end of each expert's positions, int32 [L]. Rows after
    the last end are padding, whose results nobody reads (Note [Padding]). Gradients of biases are
    sums, not of a lower precision, and left to torch: with biases, rows must be bf16, fp16 or fp32,
    and widths a multiple of 16 bytes.
    """

    def forward(self, x_PK: Tensor, weight_LMK: Tensor, ends: Tensor) -> Tensor:
        """Return x_e @ weight_e^T: [P, M]."""
        return F.grouped_mm(x_PK, weight_LMK.mT, offs=ends)

    def input_gradient(self, dy_PM: Tensor, weight_LMK: Tensor, ends: Tensor) -> Tensor:
        """Return dy_e @ weight_e: [P, K]."""
        return F.grouped_mm(dy_PM, weight_LMK, offs=ends)

    def weight_gradient(self, dy_PM: Tensor, x_PK: Tensor, ends: Tensor) -> Tensor:
        """Return dy_e^T @ x_e: [L, M, K]."""
        return F.grouped_mm(dy_PM.t(), x_PK, offs=ends)


@dataclass(frozen=True, slots=True)
class Grouped:
    """Experts by grouped products.

    Attributes:
        products: How to compute them.
    """

    products: GroupedProducts = field(default_factory=GroupedProducts)
    reads_counts: ClassVar[bool] = False

    def forward(
        self, batch: ExpertBatch, experts: ExpertWeights
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute the output [N, D]; keep the pre-activations."""
        ends, multiply = _ends(batch), self.products.forward
        x_PD = kernels_for(batch.rows).gather_rows(batch.rows, batch.row_at(), holes=False)
        pre = tuple(multiply(x_PD, weight, ends) for weight in experts.weights.gate_up)
        for piece, bias in zip(pre, experts.biases.gate_up, strict=True):
            _add_bias(piece, bias, ends)
        gate_PH, up_PH = pre if len(pre) > 1 else pre[0].chunk(2, 1)
        activation = experts.activation
        gated_PH = activation.gate(gate_PH)
        h_PH = activation.product(gated_PH, up_PH, out=gated_PH)
        y_PD = multiply(h_PH, experts.weights.down, ends)
        _add_bias(y_PD, experts.output_bias, ends)
        return batch.sum_over_slots(y_PD, batch.weights), pre

    def backward(
        self,
        batch: ExpertBatch,
        scale_P: Tensor | None,
        experts: ExpertWeights,
        kept: tuple[Tensor, ...],
        grad_out: Tensor,
        *,
        wanted: WeightGradients,
    ) -> InputGradients:
        """Compute the gradients of rows and scale; hand the factors of the others to `wanted`."""
        ends, row_at = _ends(batch), batch.row_at()
        gather = kernels_for(batch.rows).gather_rows
        x_PD = gather(batch.rows, row_at, holes=False)
        dy_PD = gather(grad_out, row_at, holes=False)
        dh_PH = self.products.input_gradient(dy_PD, experts.weights.down, ends)
        gate_PH, up_PH = kept if len(kept) > 1 else kept[0].chunk(2, 1)
        gated_PH = experts.activation.gate(gate_PH)
        h_PH = experts.activation.product(gated_PH, up_PH)
        grad_scale = None
        if scale_P is not None:
            grad_scale = _dot(dh_PH, h_PH, scale_P.dtype)
            if experts.output_bias is not None:
                bias_PD = experts.output_bias.index_select(0, _expert_at(ends, dy_PD))
                grad_scale += _dot(dy_PD, bias_PD, scale_P.dtype)
            dh_PH.mul_(scale_P[:, None])
            h_PH.mul_(scale_P[:, None])
        dpre = tuple(torch.empty_like(piece) for piece in kept)
        dgate_PH, dup_PH = dpre if len(dpre) > 1 else dpre[0].chunk(2, 1)
        experts.activation.backward(dh_PH, gate_PH, up_PH, gated_PH, dgate_PH, dup_PH)
        dx_PD, *others = [
            self.products.input_gradient(piece, weight, ends)
            for piece, weight in zip(dpre, experts.weights.gate_up, strict=True)
        ]
        for other in others:
            dx_PD += other
        multiply = self.products.weight_gradient
        for gradient, piece in zip(wanted.weights.gate_up, dpre, strict=True):
            gradient.set(partial(multiply, piece, x_PD, ends))
        wanted.weights.down.set(partial(multiply, dy_PD, h_PH, ends))
        for bias, piece in zip(wanted.biases.gate_up, dpre, strict=True):
            if bias is not None:
                bias.set(partial(_bias_gradient, piece, None, ends))
        if wanted.biases.down is not None:
            wanted.biases.down.set(partial(_bias_gradient, dy_PD, scale_P, ends))
        return InputGradients(batch.sum_over_slots(dx_PD), grad_scale)


def _ends(batch: ExpertBatch) -> Tensor:
    return batch.num_tokens_per_expert.cumsum(0, dtype=torch.int32)


def _expert_at(ends: Tensor, values_PM: Tensor) -> Tensor:
    """Expert of each position [P]; some expert where there is padding."""
    positions = torch.arange(values_PM.shape[0], device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends, positions, right=True).clamp_(max=ends.shape[0] - 1)


def _add_bias(y_PM: Tensor, bias_LM: Tensor | None, ends: Tensor) -> None:
    """Add each expert's bias to its rows, in place."""
    if bias_LM is not None:
        y_PM += bias_LM.index_select(0, _expert_at(ends, y_PM))


def _bias_gradient(dy_PM: Tensor, scale_P: Tensor | None, ends: Tensor) -> Tensor:
    """Sum of the rows of each expert, each times its scale: [L, M]. See Note [A bias is a weight].

    A product rather than an addition per row: no two writes meet, and padding is not read.
    """
    one_P8 = dy_PM.new_zeros(dy_PM.shape[0], 8)  # 8 columns: 16 bytes
    one_P8[:, 0] = 1 if scale_P is None else scale_P
    return GroupedProducts().weight_gradient(dy_PM, one_P8, ends)[:, :, 0]


def _dot(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    product: Tensor = torch.linalg.vecdot(a.to(dtype), b.to(dtype))
    return product
