"""The kernels behind `triton_activation`, in Triton.

Programs and offsets are those of `hp_expert.kernels.triton_kernels`.

Loaded numbers are widened to fp32 or more, and results are rounded once, when they are stored.

Shape symbols: P positions, H hidden width, L local experts.
"""

import triton
import triton.language as tl


@triton.jit
def _gate(
    gate: tl.tensor, CLAMPED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the gating factor and its derivative."""
    if CLAMPED:
        limit = tl.full((1,), LIMIT, gate.dtype)
        alpha = tl.full((1,), ALPHA, gate.dtype)
        inside = tl.where(gate > limit, limit, gate)  # NaN stays
        s = 1.0 / (1.0 + tl.exp(-(inside * alpha)))
        slope = s + inside * alpha * s * (1.0 - s)
        return inside * s, tl.where(gate > limit, 0.0, slope)
    s = 1.0 / (1.0 + tl.exp(-gate))
    return gate * s, s * (1.0 + gate * (1.0 - s))


@triton.jit
def _lifted(up: tl.tensor, CLAMPED: tl.constexpr, LIMIT: tl.constexpr) -> tl.tensor:
    """Return the function of `up` that is multiplied with the gating factor."""
    if CLAMPED:
        limit = tl.full((1,), LIMIT, up.dtype)
        return tl.where(tl.abs(up) > limit, tl.where(up > 0, limit, -limit), up) + 1.0
    return up


@triton.jit
def activate(  # noqa: PLR0917  # Triton's launch passes them by position
    out: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    row_of: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    CLAMPED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
) -> None:
    """Activate one row; padding is left as it is."""
    position = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = column < tl.where(tl.load(row_of + position) >= 0, width, 0)
    place = position * stride + column
    g = tl.load(gate + place, mask=here, other=0.0).to(WIDE)
    u = tl.load(up + place, mask=here, other=0.0).to(WIDE)
    gated, _slope = _gate(g, CLAMPED, LIMIT, ALPHA)
    h = gated * _lifted(u, CLAMPED, LIMIT)
    tl.store(out + position * width + column, h.to(out.dtype.element_ty), mask=here)


@triton.jit
def activate_backward(  # noqa: PLR0917
    dgate: tl.tensor,
    dup: tl.tensor,
    scaled: tl.tensor,
    grad_weights: tl.tensor,
    dh: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    row_of: tl.tensor,
    slot_of: tl.tensor,
    weights: tl.tensor,
    extra: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    CLAMPED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
) -> None:
    """Write the gradients of one row and of its weight, and the activation times the weight."""
    position = tl.program_id(0).to(tl.int64)
    is_there = tl.load(row_of + position) >= 0
    end = tl.where(is_there, width, 0)
    if weights is not None:
        slot = tl.load(slot_of + position).to(tl.int64)
        weight = tl.load(weights + slot, mask=is_there, other=0.0).to(WIDE)
    dot = tl.zeros((BLOCK,), dtype=WIDE)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        here = column < end
        place = position * stride + column
        g = tl.load(gate + place, mask=here, other=0.0).to(WIDE)
        u = tl.load(up + place, mask=here, other=0.0).to(WIDE)
        d = tl.load(dh + position * width + column, mask=here, other=0.0).to(WIDE)
        gated, slope = _gate(g, CLAMPED, LIMIT, ALPHA)
        lifted = _lifted(u, CLAMPED, LIMIT)
        h = gated * lifted
        if weights is not None:
            dot += d * h
            d *= weight
            h *= weight
        du = d * gated
        if CLAMPED:
            du = tl.where(tl.abs(u) > tl.full((1,), LIMIT, u.dtype), 0.0, du)
        dg = d * lifted * slope
        tl.store(dgate + place, dg.to(dgate.dtype.element_ty), mask=here)
        tl.store(dup + place, du.to(dup.dtype.element_ty), mask=here)
        tl.store(scaled + position * width + column, h.to(scaled.dtype.element_ty), mask=here)
    if weights is not None:
        grad = tl.sum(dot)
        if extra is not None:
            grad += tl.load(extra + position, mask=is_there, other=0.0).to(WIDE)
        tl.store(grad_weights + slot, grad.to(grad_weights.dtype.element_ty), mask=is_there)


@triton.jit
def zero_idle(
    gradient: tl.tensor, num_rows: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Zero the gradient of an expert without rows; leave other gradients as they are."""
    expert = tl.program_id(0).to(tl.int64)
    if tl.load(num_rows + expert) == 0:
        zeros = tl.zeros((BLOCK,), dtype=gradient.dtype.element_ty)
        step = tl.num_programs(1) * BLOCK
        for start in range(tl.program_id(1).to(tl.int64) * BLOCK, size, step):
            place = start + tl.arange(0, BLOCK)
            tl.store(gradient + expert * size + place, zeros, mask=place < size)
