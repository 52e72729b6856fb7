"""The arithmetic of experts as one autograd Function.

out[n] = sum over the slots of row n of weight * SwiGLU_e(rows[n]), where
SwiGLU_e(x) = (silu(x @ w1_e^T + b1_e) * (x @ w3_e^T + b3_e)) @ w2_e^T + b2_e
(Shazeer 2020, arXiv:2002.05202).

Kept for backward are the rows as they arrived, their routing, and the pre-activations of gate and
up. Backward gathers the rows again and recomputes the activation h. The gradient of a routing
weight needs no expert output: with d = dout @ w2 it is <dout, h @ w2^T + b2> = <d, h> + <dout, b2>,
and d is needed in any case.

Shape symbols: N rows, F slots per row, P positions (see `hp_expert.batch`), L local experts,
D width, H hidden width.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hp_expert.batch import ExpertBatch, Places, autocast
from hp_expert.experts import loop
from hp_expert.experts.activation import SWIGLU, Activation, require_activation
from hp_expert.experts.grouped import Grouped, ProductsOfNothing
from hp_expert.experts.types import (
    Backend,
    CastOf,
    ExpertWeights,
    Projections,
    WeightGradient,
    WeightGradients,
)
from hp_expert.placement import local_part
from hp_platform import wait_tensor
from hp_platform.autograd import Context, differentiable_once

T = TypeVar("T")
_GROUPED: Final = Grouped()
_OF_NOTHING: Final = Grouped(ProductsOfNothing())
_PLACED: Final = 4  # tensors at the beginning of `Places`


class _Options(NamedTuple):
    """The settings of a call, the function for casts, and the dtype of the output."""

    adds_output_bias: bool
    activation: Activation
    cast_of: CastOf | None
    dtype: torch.dtype


def routed_swiglu(
    batch: ExpertBatch,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    *,
    b1: Tensor | None = None,
    b3: Tensor | None = None,
    b2: Tensor | None = None,
    adds_output_bias: bool = True,
    activation: Activation = SWIGLU,
) -> Tensor:
    """Apply the experts to a batch, in the way that is fastest for its device, dtype and size.

    Differentiable once, with respect to rows, routing weights, weights and biases. Weights that are
    wider than the rows are cast to the dtype of the rows and get gradients in their own dtype. A
    weight may be a `DTensor`: its local part has the shape below, and its gradient is a `DTensor`.

    Args:
        batch: Rows of any floating dtype, and their routing. Counts that are on the device only
            are read by the host, except on CUDA in bf16.
        w1: Gate projections [L, H, D].
        w3: Up projections [L, H, D].
        w2: Down projections [L, D, H].
        b1: Biases of the gate projections [L, H].
        b3: Biases of the up projections [L, H].
        b2: Biases of the down projections [L, D].
        adds_output_bias: Whether the output contains b2. Where ranks have parts of H and sum their
            outputs, one rank adds it. All of them compute its whole gradient, which must not be
            summed over these ranks.
        activation: Activation between the projections; `ClampedSwiGLU` for gpt-oss.

    Returns:
        Outputs [N, D], of the dtype of the rows. Under `torch.autocast` the products are of its
        dtype, and the sums over the slots of a row are not rounded to it.

    Raises:
        ValueError: If the rows or weights do not fit each other, or the dtype of a weight does not
            contain all values of the dtype of the rows.
    """
    require_activation(activation)
    weights, biases = Projections((w1, w3), w2), Projections((b1, b3), b2)
    experts = ExpertWeights(weights, biases, adds_output_bias, activation)
    return routed_swiglu_by(None, batch, experts)


def routed_swiglu_fused(
    batch: ExpertBatch,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    adds_output_bias: bool = True,
) -> Tensor:
    """Apply experts whose gate and up projections are one tensor, as Hugging Face stores them.

    The tensors are used as they are, and the gradient of `gate_up` is one tensor as well. See
    `routed_swiglu` for the rest.

    Args:
        batch: Rows of any floating dtype, and their routing.
        gate_up: Gate projections in rows 0 .. H, up projections in rows H .. 2H; [L, 2H, D].
        down: Down projections [L, D, H].
        gate_up_bias: Biases of the gate and up projections [L, 2H].
        down_bias: Biases of the down projections [L, D].
        adds_output_bias: Whether the output contains `down_bias`.

    Returns:
        Outputs [N, D], of the dtype of the rows.

    Raises:
        ValueError: As `routed_swiglu`.
    """
    weights, biases = Projections((gate_up,), down), Projections((gate_up_bias,), down_bias)
    return routed_swiglu_by(None, batch, ExpertWeights(weights, biases, adds_output_bias))


def routed_swiglu_by(
    backend: Backend | None,
    batch: ExpertBatch,
    experts: ExpertWeights,
    *,
    cast_of: CastOf | None = None,
) -> Tensor:
    """Apply the experts by a backend; see `routed_swiglu`.

    Args:
        backend: Backend that computes; None: the fastest.
        batch: Rows and their routing.
        experts: Parameters.
        cast_of: Function that returns a parameter in the dtype of the rows; None: forward casts
            the parameters, and backward again.
    """
    dtype = batch.rows.dtype
    batch = batch._replace(rows=autocast(batch.rows))
    weights, biases = experts.weights, experts.biases
    parameters = (*weights.gate_up, weights.down, *biases.gate_up, biases.down)
    _require_fit(batch, parameters)
    backend = _fastest(batch, weights.down) if backend is None else backend
    if batch.counts is None and backend.reads_counts:
        batch = _without_padding(batch)
    options = _Options(experts.adds_output_bias, experts.activation, cast_of, dtype)
    with torch.autocast(batch.rows.device.type, enabled=False):
        out: Tensor = _RoutedSwiGLU.apply(
            batch.rows, batch.weights, batch, backend, options, *parameters
        )
    return out


class _ExpertContext(Context, Protocol):
    saved_tensors: tuple[Tensor, ...]
    batch: ExpertBatch
    places: tuple[bool, bool] | None
    backend: Backend
    options: _Options
    parameters: tuple[Tensor | None, ...]


class _RoutedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  # autograd passes by position
        ctx: _ExpertContext,
        rows: Tensor,
        slot_weights: Tensor | None,
        batch: ExpertBatch,
        backend: Backend,
        options: _Options,
        *parameters: Tensor | None,
    ) -> Tensor:
        batch = batch._replace(rows=rows, weights=slot_weights)
        experts = _cast(_here(parameters), parameters, rows.dtype, options)
        out, kept = backend.forward(batch, experts, dtype=options.dtype)
        placed = batch.placed
        where = (batch.order.to(batch.narrow),) if placed is None else placed[:_PLACED]
        ctx.save_for_backward(rows, slot_weights, *where, *parameters, *kept)
        nothing = rows.new_empty(0)
        ctx.batch = batch._replace(rows=nothing, weights=None, order=nothing, placed=None)
        ctx.places = None if placed is None else (placed.partial, placed.padded)
        ctx.backend, ctx.options = backend, options
        # The saved ones may be copies of the parameters; see `hp_expert.experts.types`.
        ctx.parameters = parameters
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: _ExpertContext, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        num_parameters = len(ctx.parameters)
        rows, slot_weights, order, *saved = ctx.saved_tensors
        placed = None
        if ctx.places is not None:
            row, position, ends, *saved = saved
            placed = Places(order, row, position, ends, *ctx.places)
        batch = ctx.batch._replace(rows=rows, weights=slot_weights, order=order, placed=placed)
        parts = _here(saved[:num_parameters])
        experts = _cast(parts, ctx.parameters, rows.dtype, ctx.options)
        # Sums over rows, which gradients of biases are, are cheap to compute more precisely.
        wide = torch.promote_types(rows.dtype, torch.float32)
        wanted: list[WeightGradient | None] = [None] * num_parameters
        for index, (part, parameter) in enumerate(zip(parts, ctx.parameters, strict=True)):
            if part is not None and parameter is not None:
                wanted[index] = WeightGradient(
                    parameter,
                    part.shape,
                    dtype=wide if 2 * index >= num_parameters else rows.dtype,
                    batch=batch,
                    needed=ctx.needs_input_grad[5 + index],
                )
        weights, biases = _by_projection(wanted)
        grad_out = wait_tensor(grad_out).to(rows.dtype).contiguous()
        with torch.autocast(rows.device.type, enabled=False):
            grads = ctx.backend.backward(
                batch,
                experts,
                tuple(saved[num_parameters:]),
                grad_out,
                wanted=WeightGradients(cast("Projections[WeightGradient]", weights), biases),
            )
        results = [each.result() if each is not None and each.now else None for each in wanted]
        return (grads.rows, grads.weights, None, None, None, *results)


def _by_projection(flat: Sequence[T]) -> tuple[Projections[T], Projections[T]]:
    """Return weights and biases from the parameters of `_RoutedSwiGLU`."""
    *gate_up, down = flat[: len(flat) // 2]
    *gate_up_bias, down_bias = flat[len(flat) // 2 :]
    return Projections(tuple(gate_up), down), Projections(tuple(gate_up_bias), down_bias)


def _here(parameters: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the local parts of parameters."""
    parts = list(parameters)
    for index, parameter in enumerate(parameters):
        if isinstance(parameter, DTensor):
            parts[index] = parameter.to_local()
    return parts


def _cast(
    parts: list[Tensor | None],
    parameters: Sequence[Tensor | None],
    dtype: torch.dtype,
    options: _Options,
) -> ExpertWeights:
    """Return the local parts of the parameters in `dtype`."""
    casts = list(parts)
    for index, (part, parameter) in enumerate(zip(parts, parameters, strict=True)):
        if part is not None and parameter is not None and part.dtype != dtype:
            made = None if options.cast_of is None else options.cast_of(parameter, dtype)
            casts[index] = part.to(dtype) if made is None else local_part(made)
    weights, biases = _by_projection(casts)
    experts = cast("Projections[Tensor]", weights)
    return ExpertWeights(experts, biases, options.adds_output_bias, options.activation)


def _without_padding(batch: ExpertBatch) -> ExpertBatch:
    """Return the batch with its counts on the host, read from the device if there are slots."""
    counts = tuple(
        batch.num_tokens_per_expert.tolist()
        if batch.num_slots
        else [0] * batch.num_tokens_per_expert.shape[0]
    )
    return batch._replace(counts=counts, order=batch.order[: sum(counts)], placed=None)


def _fastest(batch: ExpertBatch, down: Tensor) -> Backend:
    """Return grouped products for CUDA, bf16 and strides of a multiple of 16 bytes; else a loop."""
    rows, H, D = batch.rows, down.shape[2], batch.rows.shape[1]
    fits = rows.is_cuda and rows.dtype == torch.bfloat16 and H % 8 == 0 and D % 8 == 0
    if not fits:
        return loop
    return _GROUPED if batch.order.numel() > 0 else _OF_NOTHING


def _require_fit(batch: ExpertBatch, parameters: Sequence[Tensor | None]) -> None:
    """Raise ValueError if rows, routing, weights and biases do not fit each other."""
    rows, half, parts = batch.rows, len(parameters) // 2, _here(parameters)
    down = parts[half - 1]
    assert down is not None
    L, D, H = down.shape
    if rows.ndim != 2 or rows.shape[1] != D:
        raise ValueError(f"rows ({tuple(rows.shape)}) must be [N, dim ({D})]")
    M = 2 * H // (half - 1)
    shapes: list[tuple[int, ...]] = [*[(L, M, D)] * (half - 1), (L, D, H)]
    shapes += [*[(L, M)] * (half - 1), (L, D)]
    for parameter, shape in zip(parts, shapes, strict=True):
        if parameter is None:
            continue
        if parameter.shape != shape:
            raise ValueError(
                f"shape of a weight or bias ({tuple(parameter.shape)}) must be {shape} "
                f"beside down projections of {(L, D, H)}"
            )
        if torch.promote_types(rows.dtype, parameter.dtype) != parameter.dtype:
            raise ValueError(
                f"dtype of rows ({rows.dtype}) must equal that of the expert weights "
                f"({parameter.dtype}) or be contained in it"
            )
    num_counts = batch.num_tokens_per_expert.shape[0]
    if num_counts != L:
        raise ValueError(f"len(counts) ({num_counts}) must equal the number of local experts ({L})")
    counts, P = batch.counts, batch.order.numel()
    if counts is not None and (len(counts), sum(counts)) != (L, P):
        raise ValueError(
            f"counts ({len(counts)} of them, {sum(counts)} in all) must be one for each of {L} "
            f"local experts, {P} in all"
        )
