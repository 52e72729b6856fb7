"""What tensors travel between two stages: shapes and dtypes, and how a rank tells another of them.

A header is one int64 tensor of a fixed size, so that it can be received before anything is known:
the number of tensors, then for each its dtype, whether it requires grad, its number of dimensions
and its shape.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

HEADER_SIZE = 256
"""Numbers in a header: enough for 36 tensors of four dimensions."""

_UNKNOWN = -1
_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor looks like that a stage receives for one microbatch.

    Attributes:
        shape: Of one microbatch.
        dtype: Of its elements.
        requires_grad: Whether the stage before gets a gradient of it; None means that it does if
            the dtype can have one.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    requires_grad: bool | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """Return the spec of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def has_grad(self) -> bool:
        """Whether a gradient of the tensor travels back."""
        if self.requires_grad is None:
            return self.dtype.is_floating_point or self.dtype.is_complex
        return self.requires_grad

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor has this shape and dtype."""
        return tuple(tensor.shape) == self.shape and tensor.dtype == self.dtype

    def empty(self, device: torch.device) -> Tensor:
        """Return an uninitialised tensor of this shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


Specs = tuple[TensorSpec, ...]
"""One per tensor of a message."""


def as_specs(specs: TensorSpec | Sequence[TensorSpec] | None) -> Specs | None:
    """Return specs as a tuple; None stays None."""
    if specs is None:
        return None
    return (specs,) if isinstance(specs, TensorSpec) else tuple(specs)


def describe(specs: Iterable[TensorSpec]) -> str:
    """Return specs for people, for example ``[2, 3] float32, [2] int64``."""
    return ", ".join(map(str, specs))


def check_expected(
    values: Sequence[Tensor], expected: Specs, *, stage: int, microbatch: int, after: int
) -> None:
    """Refuse outputs of a stage that the stage after it does not expect.

    Raises:
        ValueError: If their number, a shape or a dtype differs.
    """
    if len(values) != len(expected) or not all(
        spec.fits(value) for spec, value in zip(expected, values, strict=True)
    ):
        raise ValueError(
            f"output ({describe(map(TensorSpec.of, values))}) of stage {stage}, microbatch "
            f"{microbatch} must be as input_spec ({describe(expected)}) of stage {after}; without "
            "an input_spec shapes may differ"
        )


def to_header(specs: Specs | None) -> Tensor:
    """Return the header of a message.

    Args:
        specs: Of its tensors; None says that every message will have a header of its own.

    Raises:
        ValueError: If the specs do not fit into a header, or a dtype is not known to it.
    """
    header = torch.zeros(HEADER_SIZE, dtype=torch.int64)
    if specs is None:
        header[0] = _UNKNOWN
        return header
    numbers = [len(specs)]
    for spec in specs:
        if spec.dtype not in _DTYPES:
            raise ValueError(f"dtype ({spec.dtype}) must be one of {_DTYPES} to pass a stage")
        code = _DTYPES.index(spec.dtype)
        numbers += [code, int(spec.has_grad), len(spec.shape), *spec.shape]
    if len(numbers) > HEADER_SIZE:
        raise ValueError(
            f"numbers that describe a stage's {len(specs)} tensors ({len(numbers)}) must be <= "
            f"{HEADER_SIZE}"
        )
    header[: len(numbers)] = torch.tensor(numbers)
    return header


def from_header(header: Tensor) -> Specs | None:
    """Read a header; the inverse of `to_header`."""
    numbers = iter(header.tolist())
    count = next(numbers)
    if count == _UNKNOWN:
        return None
    specs = []
    for _ in range(count):
        dtype, requires_grad = _DTYPES[next(numbers)], bool(next(numbers))
        shape = tuple(next(numbers) for _ in range(next(numbers)))
        specs.append(TensorSpec(shape, dtype, requires_grad))
    return tuple(specs)
