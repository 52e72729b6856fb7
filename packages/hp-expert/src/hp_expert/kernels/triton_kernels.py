"""The kernels behind `triton_rows`, in Triton.

A program moves one row, or BLOCK columns of one. Every access is then a run of neighbouring words
of 16 bytes (if D * b is a multiple of 16), whatever the permutation. An output has one writer, and
a sum has one order, that of the choices: no atomics, and the same bits in every run. Products are
not contracted into fused multiply-adds, so that sums have the bits of torch's kernels on CUDA.

R * D reaches 2 ** 31 at 262144 rows of 8192, so offsets are 64 bits wide. A product has the width
of its factors, and indices may be int32: loaded indices and the number of a program are widened
before any arithmetic. `nox -s cubins` proves that no part of an address overflows in 32 bits.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["token_of"])
def gather_rows(
    out: tl.tensor,
    x: tl.tensor,
    token_of: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Copy the row of a token to its position."""
    position = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_of + position).to(tl.int64)
    # A token that does not exist has no columns.
    here = column < tl.where(token >= 0, width, 0)
    row = tl.load(x + token * width + column, mask=here, other=0.0)
    tl.store(out + position * width + column, row, mask=column < width)


@triton.jit(do_not_specialize=["num_positions"])
def gather_values(
    out: tl.tensor,
    x: tl.tensor,
    index_of: tl.tensor,
    num_positions: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Copy single values to their positions."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = position < num_positions
    index = tl.load(index_of + position, mask=here, other=-1).to(tl.int64)
    value = tl.load(x + index, mask=index >= 0, other=0.0)
    tl.store(out + position, value, mask=here)


@triton.jit
def sum_rows(  # noqa: PLR0917  # Triton's launch passes them by position
    out: tl.tensor,
    rows: tl.tensor,
    more: tl.tensor,
    position_of: tl.tensor,
    weights: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Sum the rows of a token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=WIDE)
    for choice in tl.static_range(K):
        slot = token * K + choice
        position = tl.load(position_of + slot).to(tl.int64)
        here = column < tl.where(position >= 0, width, 0)
        row = tl.load(rows + position * width + column, mask=here, other=0.0).to(WIDE)
        if more is not None:
            row += tl.load(more + position * width + column, mask=here, other=0.0).to(WIDE)
        if weights is not None:
            row *= tl.load(weights + slot, mask=position >= 0, other=0.0).to(WIDE)
        total += row
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def sum_rows_backward(  # noqa: PLR0917
    grad_rows: tl.tensor,
    grad_weights: tl.tensor,
    grad: tl.tensor,
    rows: tl.tensor,
    slot_of: tl.tensor,
    weights: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Write the gradients of a row and of its weight."""
    position = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_of + position).to(tl.int64)
    token = slot // K
    weight = tl.load(weights + slot, mask=slot >= 0, other=0.0).to(WIDE)
    end = tl.where(slot >= 0, width, 0)
    dot = tl.zeros((BLOCK,), dtype=WIDE)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        here = column < end
        dy = tl.load(grad + token * width + column, mask=here, other=0.0).to(WIDE)
        row = tl.load(rows + position * width + column, mask=here, other=0.0).to(WIDE)
        dx = (dy * weight).to(grad_rows.dtype.element_ty)
        tl.store(grad_rows + position * width + column, dx, mask=column < width)
        dot += dy * row
    grad_weight = tl.sum(dot).to(grad_weights.dtype.element_ty)
    tl.store(grad_weights + slot, grad_weight, mask=slot >= 0)
