"""Digests of tensors that add up over the parts of ranks.

Of a tensor a recording holds its norm and `NUM_SIGNS` sums of its values with signs ``+1`` and
``-1``. A sign is a product of one sign per dim, drawn from the index in the *whole* tensor: so sums
of the parts that ranks hold add up to those of the whole; no rank needs another. The difference of
two such sums has the mean square of the difference of the tensors.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hp_verify.recording.events import NUM_SIGNS, Box, Piece

_MIX = (0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
"""Of splitmix64 (Steele, Lea and Flood 2014), as signed numbers of 64 bits."""
_NOT_FINITE = 7.25


@dataclass(frozen=True, slots=True)
class Digest:
    """Digests of parts, where the parts are: nothing waits for a device until `pieces`.

    Attributes:
        box: Place of each part in its whole tensor.
        rows: Sample of each; empty names: they have none.
        sums: `[N, NUM_SIGNS]`.
        norms: `[N]`.
        shape: Shape of each whole, where not all parts of a tensor are of the same.
    """

    box: Box
    rows: tuple[str, ...]
    sums: Tensor
    norms: Tensor
    shape: tuple[int, ...] = ()

    def pieces(self) -> tuple[Piece, ...]:
        """Read them."""
        read = zip(self.rows, self.sums.tolist(), self.norms.tolist(), strict=True)
        return tuple(Piece(self.box, tuple(sums), norm, row) for row, sums, norm in read)


def digest_of(part: Tensor, box: Box) -> Digest:
    """Digest a part of a tensor.

    Args:
        part: The part, of any shape and dtype.
        box: Place of the part in the whole tensor; as many indices in each dim as `part` has.
    """
    return digest_rows(part[None], box, ("",))


def digest_rows(parts: Tensor, box: Box, rows: tuple[str, ...]) -> Digest:
    """Digest many parts that are the same part of different tensors.

    Args:
        parts: Samples, `[N, ...]`, of any dtype.
        box: Place of each part in its whole tensor, without the dim of samples.
        rows: Name of each sample.
    """
    values = parts.detach()
    if torch.is_autocast_enabled(values.device.type):  # a job's, not ours
        with torch.autocast(values.device.type, enabled=False):
            return digest_rows(values, box, rows)
    if values.is_complex():
        real, imaginary = (digest_rows(x, box, rows) for x in (values.real, values.imag))
        # Signs of other numbers for the imaginary parts, which are drawn apart from these.
        sums = real.sums + imaginary.sums.roll(1, -1)
        return Digest(box, rows, sums, torch.hypot(real.norms, imaginary.norms))
    values = _widened(values)
    norms = torch.linalg.vector_norm(values.flatten(1), dim=1) if values.ndim > 1 else values.abs()
    if values.device.type != "cpu":
        values = _finite(values)  # whether any are not cannot be asked without waiting
    elif not bool(norms.isfinite().all()):
        values = _finite(values.double())
    if values.ndim == 1:
        return Digest(box, rows, values[:, None].repeat(1, NUM_SIGNS), norms)  # not a view of them
    num_dims, kind = values.ndim - 1, (values.dtype, values.device)
    if num_dims == 1:
        return Digest(box, rows, values @ _signs(0, box[0], *kind), norms)
    # The first dim is summed over first, from the left: a product with four columns is six times
    # as slow as one with four rows, and of a short step that of all parameters is most of the cost.
    lead = _signs(0, box[0], *kind).T.expand(len(values), -1, -1)
    sums = torch.bmm(lead, values.flatten(2)).unflatten(2, values.shape[2:])
    for dim in range(num_dims - 1, 0, -1):
        signs = _signs(dim, box[dim], *kind).T  # [NUM_SIGNS, indices]
        sums = (sums * signs.view(NUM_SIGNS, *(1,) * (dim - 1), -1)).sum(-1)
    return Digest(box, rows, sums, norms)


def _widened(values: Tensor) -> Tensor:
    """Cast real values of any dtype to a floating one of 32 bits or more."""
    is_narrow = values.is_floating_point() and values.itemsize == 1  # which no dtype is promoted to
    wide = torch.float32 if is_narrow else torch.promote_types(values.dtype, torch.float32)
    return values.to(wide)


def _finite(values: Tensor) -> Tensor:
    """Replace numbers that are not finite by a constant: the norm tells that there are some."""
    return torch.where(values.isfinite(), values, _NOT_FINITE)


def sum_of_digests(terms: Sequence[Digest]) -> Digest:
    """Digest the sum of tensors that are the same part; its norm is what its sums tell.

    Args:
        terms: Digests of them, at least one.
    """
    if len(terms) == 1:
        return terms[0]
    sums = torch.stack([term.sums for term in terms]).sum(0)
    return Digest(terms[0].box, terms[0].rows, sums, sums.square().mean(-1).sqrt())


def digests_of_rows(rows: Tensor, *, num_bytes: int) -> list[bytes]:
    """Hash the bits of each row, `[N, ...]`, into `num_bytes` bytes."""
    raw = rows.detach().contiguous().cpu().view(torch.uint8).numpy()
    return [hashlib.blake2b(row.data, digest_size=num_bytes).digest() for row in raw]


@lru_cache(maxsize=4096)
def _signs(dim: int, span: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return signs of a dim's indices, `[indices, NUM_SIGNS]`."""
    index = torch.arange(*span, dtype=torch.int64)[:, None] * NUM_SIGNS + torch.arange(NUM_SIGNS)
    mixed = (index + dim * 0x51ED270B) * _MIX[0]
    for shift, factor in ((30, _MIX[1]), (27, _MIX[2])):
        mixed = (mixed ^ _shifted(mixed, shift)) * factor
    return (1 - 2 * (_shifted(mixed, 31) & 1)).to(dtype).to(device)


def _shifted(values: Tensor, by: int) -> Tensor:
    """Shift bits to the right as of unsigned numbers."""
    return (values >> by) & ((1 << (64 - by)) - 1)
