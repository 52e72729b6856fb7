"""All experts in one product: `torch.nn.functional.grouped_mm`, for CUDA and bf16.

Its limits shape this file: offsets are int32 and not checked; strides must be multiples of 16
bytes; rows after the last offset are uninitialised memory; gradients must not be expanded; there is
no fp64. Offsets stay on the device: nothing here waits for the device.

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
from hp_expert.experts.activation import activate, activate_backward, dot
from hp_expert.experts.types import ExpertWeights, InputGradients, WeightGradients
from hp_expert.kernels import kernels_for


class GroupedProducts:
    """The products of rows with the matrix of their expert; override them for a lower precision.

    `GroupedExperts.products` takes an object of such a class.

    Rows are in expert order; `ends` has the end of each expert's positions, int32 [L]. Rows after
    the last end are padding: their results are not read (Note [Padding]). Gradients of biases are
    sums that torch computes in the dtype of the rows: with biases, rows must be bf16, fp16 or fp32,
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


class ProductsOfNothing(GroupedProducts):
    """The products of zero rows, which `grouped_mm` does not take.

    Everything around them runs as with rows, so that a rank that gets no rows at first loads all
    kernels before rows arrive; see Note [Few variants].
    """

    def forward(self, x_PK: Tensor, weight_LMK: Tensor, ends: Tensor) -> Tensor:
        """Return [0, M]."""
        del ends
        return x_PK.new_empty(0, weight_LMK.shape[1])

    def input_gradient(self, dy_PM: Tensor, weight_LMK: Tensor, ends: Tensor) -> Tensor:
        """Return [0, K]."""
        del ends
        return dy_PM.new_empty(0, weight_LMK.shape[2])

    def weight_gradient(self, dy_PM: Tensor, x_PK: Tensor, ends: Tensor) -> Tensor:
        """Return zeros [L, M, K]."""
        return dy_PM.new_zeros(len(ends), dy_PM.shape[1], x_PK.shape[1])


@dataclass(frozen=True, slots=True)
class Grouped:
    """Experts by grouped products.

    Attributes:
        products: Products of rows and matrices.
    """

    products: GroupedProducts = field(default_factory=GroupedProducts)
    reads_counts: ClassVar[bool] = False

    def forward(
        self, batch: ExpertBatch, experts: ExpertWeights, *, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the output [N, D] and the pre-activations."""
        places, multiply = batch.places(), self.products.forward
        ends, kernels = places.ends, kernels_for(batch.rows)
        x_PD = kernels.gather_rows(batch.rows, places.row, holes=places.padded)
        pre = tuple(multiply(x_PD, weight, ends) for weight in experts.weights.gate_up)
        del x_PD
        for piece, bias in zip(pre, experts.biases.gate_up, strict=True):
            _add_bias(piece, bias, ends)
        h_PH = activate(_halves(pre), experts.activation, places)
        y_PD = multiply(h_PH, experts.weights.down, ends)
        del h_PH
        _add_bias(y_PD, experts.output_bias, ends)
        out = kernels.sum_rows(
            y_PD, places.position, batch.weights, holes=places.partial, dtype=dtype
        )
        return out, pre

    def backward(
        self,
        batch: ExpertBatch,
        experts: ExpertWeights,
        kept: tuple[Tensor, ...],
        grad_out: Tensor,
        *,
        wanted: WeightGradients,
    ) -> InputGradients:
        """Return the gradients of rows and weights; pass factors of the others to `wanted`.

        Rows are gathered after the memory of other tensors was freed: gradients of weights are
        large, and every tensor beside them adds to the peak.
        """
        places, kernels = batch.places(), kernels_for(batch.rows)
        ends, gather = places.ends, partial(kernels.gather_rows, holes=places.padded)
        dy_PD = gather(grad_out, places.row)
        dh_PH = self.products.input_gradient(dy_PD, experts.weights.down, ends)
        dpre = tuple(torch.empty_like(piece) for piece in kept)
        through = activate_backward(
            dh_PH,
            _halves(kept),
            _halves(dpre),
            experts.activation,
            batch=batch,
            places=places,
            extra_P=_bias_share(dy_PD, experts.output_bias, batch, ends),
        )
        del dh_PH
        multiply = self.products.weight_gradient
        wanted.weights.down.set(partial(multiply, dy_PD, through.scaled, ends))
        if wanted.biases.down is not None:
            wanted.biases.down.set(partial(_bias_gradient, dy_PD, batch.weight_at(), ends))
        grad_weights = through.weights
        del dy_PD, through
        dx_PD, *others = [
            self.products.input_gradient(piece, weight, ends)
            for piece, weight in zip(dpre, experts.weights.gate_up, strict=True)
        ]
        more_PD = others.pop() if others else None
        dx = kernels.sum_rows(dx_PD, places.position, None, holes=places.partial, more_RD=more_PD)
        del dx_PD, more_PD
        x_PD = gather(batch.rows, places.row)
        for gradient, piece in zip(wanted.weights.gate_up, dpre, strict=True):
            gradient.set(partial(multiply, piece, x_PD, ends))
        for bias, piece in zip(wanted.biases.gate_up, dpre, strict=True):
            if bias is not None:
                bias.set(partial(_bias_gradient, piece, None, ends))
        return InputGradients(dx, grad_weights)


def _halves(pieces: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return the gate's part and the part of the projection up; see Note [Fused or separate]."""
    gate, up = pieces if len(pieces) > 1 else pieces[0].chunk(2, 1)
    return gate, up


def _bias_share(
    dy_PD: Tensor, bias_LD: Tensor | None, batch: ExpertBatch, ends: Tensor
) -> Tensor | None:
    """Return the share of the bias of down in the gradient of the routing weights [P]."""
    if bias_LD is None or batch.weights is None:
        return None
    wide = torch.promote_types(batch.weights.dtype, torch.float32)
    return dot(dy_PD, bias_LD.index_select(0, _expert_at(ends, dy_PD)), wide)


def _expert_at(ends: Tensor, values_PM: Tensor) -> Tensor:
    """Return the expert of each position [P]; any expert where there is padding."""
    positions = torch.arange(values_PM.shape[0], device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends, positions, right=True).clamp_(max=ends.shape[0] - 1)


def _add_bias(y_PM: Tensor, bias_LM: Tensor | None, ends: Tensor) -> None:
    """Add each expert's bias to its rows, in place."""
    if bias_LM is not None:
        y_PM += bias_LM.index_select(0, _expert_at(ends, y_PM))


def _bias_gradient(dy_PM: Tensor, scale_P: Tensor | None, ends: Tensor) -> Tensor:
    """Sum the rows of each expert, each times its scale: [L, M]. See Note [A bias is a weight].

    Computed as a product instead of an addition per row: no two writes meet, and padding is not
    read.
    """
    one_P8 = dy_PM.new_zeros(dy_PM.shape[0], 8)  # 8 columns: 16 bytes
    one_P8[:, 0] = 1 if scale_P is None else scale_P
    return GroupedProducts().weight_gradient(dy_PM, one_P8, ends)[:, :, 0]
