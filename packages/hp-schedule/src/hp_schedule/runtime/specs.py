"""Specs of the tensors that travel between two stages, and headers that carry specs between ranks.

A header is one int64 tensor of a fixed size, so that it can be received before anything is known:
the number of tensors, then for each its dtype, whether it requires grad and has a layout of its
own, its number of dimensions, its shape and that layout.

Note [Layouts]. Matrix products add up in another order for operands that lie otherwise in memory.
To give the bits of one process, where a stage gets the very tensor that the one before has
returned, a received tensor is put where that one lies: with its strides, and as far from a boundary
of 64 bytes. Gradients come as dense tensors; in no case that was tried did that change a bit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hp_platform.dry_device import arrived

HEADER_SIZE = 256
"""Numbers in a header: enough for 36 tensors of four dimensions."""

_UNKNOWN = -1
_HAS_GRAD, _HAS_LAYOUT = 1, 2
_ALIGNMENT = 64
"""Bytes."""
_MAX_SPREAD = 8
"""Tensors that lie in more than so many times their own memory are received as dense ones."""

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
    """Shape, dtype and layout of a tensor that a stage receives for one microbatch.

    Attributes:
        shape: Shape for one microbatch.
        dtype: Dtype of the elements.
        requires_grad: Whether the stage before gets a gradient of it; None means that it does if
            the dtype can have one.
        strides: Strides in elements when the stage gets it (Note [Layouts]); None: dense, in the
            order of its dims.
        offset: Number of elements between a boundary of 64 bytes and its beginning in that memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    requires_grad: bool | None = None
    strides: tuple[int, ...] | None = None
    offset: int = 0

    def __post_init__(self) -> None:
        if self.strides is not None and _extent(self.shape, self.strides) is None:
            raise ValueError(
                f"strides ({list(self.strides)}) must give each element of {list(self.shape)} a "
                f"place of its own, or the same along a dim (0), within {_MAX_SPREAD} times its "
                "memory"
            )

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """Return the spec of a tensor."""
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        offset = _offset(tensor)
        if (tensor.is_contiguous() and not offset) or _extent(shape, strides) is None:
            return cls(shape, tensor.dtype, tensor.requires_grad)
        return cls(shape, tensor.dtype, tensor.requires_grad, strides, offset)

    @property
    def has_grad(self) -> bool:
        """Tell whether a gradient of the tensor travels back."""
        if self.requires_grad is None:
            return self.dtype.is_floating_point or self.dtype.is_complex
        return self.requires_grad

    def fits(self, tensor: Tensor) -> bool:
        """Tell whether a tensor has this shape and dtype."""
        return tuple(tensor.shape) == self.shape and tensor.dtype == self.dtype

    def empty(self, device: torch.device) -> Tensor:
        """Return an uninitialised tensor of this shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def laid_out(self, tensor: Tensor) -> Tensor:
        """Return a tensor in this memory layout: itself if it has that layout, otherwise a copy."""
        is_dense = self.strides is None
        lies_so = tensor.is_contiguous() if is_dense else tensor.stride() == self.strides
        if lies_so and _offset(tensor) == self.offset:
            return tensor
        strides = self.strides or _dense(self.shape)
        extent = _extent(self.shape, strides) or tensor.numel()
        place = tensor.new_empty(self.offset + extent)
        source = tensor
        for dim, stride in enumerate(strides):
            if stride == 0 and self.shape[dim] > 1:
                source = source.narrow(dim, 0, 1)
        place.as_strided(source.shape, strides, self.offset).copy_(source)
        return place.as_strided(self.shape, strides, self.offset)

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


Specs = tuple[TensorSpec, ...]
"""One spec per tensor of a message."""


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _place(spec: TensorSpec) -> tuple[tuple[int, ...], int]:
    """Return strides, 0 where there is nothing to step over, and the offset."""
    strides = spec.strides or _dense(spec.shape)
    stepped = [n if size > 1 else 0 for n, size in zip(strides, spec.shape, strict=True)]
    return tuple(stepped), spec.offset


def _offset(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    return tensor.storage_offset() * tensor.element_size() % _ALIGNMENT // tensor.element_size()


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """Return how many elements a layout spans, None if elements meet or lie too far apart."""
    if len(shape) != len(strides) or not all(shape):
        return None
    extent = size_of_all = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride:
            if stride < extent:
                return None
            extent += stride * (size - 1)
            size_of_all *= size
    return extent if extent <= _MAX_SPREAD * size_of_all else None


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
        ValueError: If their number, a shape, a dtype or how one lies in memory (Note [Layouts])
            differs.
    """
    if len(values) != len(expected) or not all(map(TensorSpec.fits, expected, values)):
        raise ValueError(
            f"output ({describe(map(TensorSpec.of, values))}) of stage {stage}, microbatch "
            f"{microbatch} must be as input_spec ({describe(expected)}) of stage {after}; without "
            "an input_spec shapes may differ"
        )
    for value, spec in zip(values, expected, strict=True):
        if value.is_contiguous() and spec.strides is None and _offset(value) == spec.offset:
            continue  # dense where dense is expected, which is nearly always
        found, wanted = _place(TensorSpec.of(value)), _place(spec)
        if found != wanted:
            raise ValueError(
                f"strides and offset {found} of an output of stage {stage}, microbatch "
                f"{microbatch} must be those of input_spec {wanted} of stage {after}: return "
                "x.contiguous().clone(), leave out the input_spec or make it by TensorSpec.of(x)"
            )


def to_header(specs: Specs | None) -> Tensor:
    """Return the header of a message.

    Args:
        specs: Specs of the message's tensors; None says that every message will have a header of
            its own.

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
        flags = spec.has_grad * _HAS_GRAD + (spec.strides is not None) * _HAS_LAYOUT
        numbers += [code, flags, len(spec.shape), *spec.shape]
        if spec.strides is not None:
            numbers += [*spec.strides, spec.offset]
    if len(numbers) > HEADER_SIZE:
        raise ValueError(
            f"numbers that describe a stage's {len(specs)} tensors ({len(numbers)}) must be <= "
            f"{HEADER_SIZE}"
        )
    header[: len(numbers)] = torch.tensor(numbers)
    return header


@dataclass(frozen=True, slots=True)
class HeaderRead:
    """The read of a header: the `purpose` of `hp_platform.dry_device.arrived`.

    Attributes:
        likely: Specs that it holds if the stages fit together; None: unknown.
    """

    likely: Specs | None

    def __str__(self) -> str:
        """Return a description for messages."""
        return "shapes of a message"

    def numbers(self, *, like: Tensor) -> Tensor:
        """Return the numbers that the host would read of such a header."""
        return like if self.likely is None else to_header(self.likely)


def from_header(header: Tensor, *, likely: Specs | None = None) -> Specs | None:
    """Read a header; the inverse of `to_header`.

    Args:
        header: Header, [HEADER_SIZE] int64 on any device.
        likely: Specs that a dry run takes the header to hold; None: unknown.
    """
    numbers = iter(arrived(header.cpu(), purpose=HeaderRead(likely)).tolist())
    count = next(numbers)
    if count == _UNKNOWN:
        return None
    specs = []
    for _ in range(count):
        dtype, flags = _DTYPES[next(numbers)], next(numbers)
        shape = tuple(next(numbers) for _ in range(next(numbers)))
        strides, offset = None, 0
        if flags & _HAS_LAYOUT:
            strides, offset = tuple(next(numbers) for _ in shape), next(numbers)
        specs.append(TensorSpec(shape, dtype, bool(flags & _HAS_GRAD), strides, offset))
    return tuple(specs)
