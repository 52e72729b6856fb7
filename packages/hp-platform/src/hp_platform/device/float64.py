"""float64: a job that computes in it, and norms that are added up in it.

In a lifted job, parameters, factories and casts to shorter floats give float64 instead. Rounding is
then about 1e-16, so that a larger difference between two jobs is a mistake.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hp_platform import _internals

_PIECE = 1 << 17  # elements, a MiB in float64
_SHORT = frozenset({torch.float32, torch.bfloat16, torch.float16})
_CASTS = frozenset({torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16})


class Lifting(TorchFunctionMode):
    """Mode in which functions of torch use float64 instead of shorter floats."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: _internals.Arguments = (),
        kwargs: _internals.Keywords | None = None,
    ) -> object:
        """Call a function of torch with float64 instead of shorter floats."""
        if func in _CASTS:
            return args[0].double()
        return func(*map(lifted, args), **{k: lifted(v) for k, v in (kwargs or {}).items()})


@contextmanager
def lifting() -> Iterator[None]:
    """Compute in float64 in this thread inside the context; see :func:`lift`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Lifting():
            yield
    finally:
        torch.set_default_dtype(before)


def lift() -> None:
    """Compute in float64 from now on, in this thread.

    Autocast does not cast float64, so that it need not be disabled.
    """
    torch.set_default_dtype(torch.float64)
    torch.set_default_dtype = lambda _dtype: None
    Lifting().__enter__()  # for as long as the program runs


def lifted(value: object) -> object:
    """Return float64 for the dtype of a shorter float, and any other value as it is."""
    return torch.float64 if isinstance(value, torch.dtype) and value in _SHORT else value


def float64_norms(tensors: Sequence[Tensor], norm_type: float = 2.0) -> list[Tensor]:
    """Return the norm of each tensor, summed in float64.

    Torch reduces a tensor in a wider dtype than its own by casting all of it first, on a CPU and on
    CUDA (`make_reduction` of aten/src/ATen/native/ReduceOpsUtils.h): for gradients in float32 that
    takes twice their memory. CUDA's kernels for lists of tensors cast what they read. A CPU has no
    such kernels, so that pieces are cast there that stay in its caches.

    Args:
        tensors: Tensors of any shapes and floating dtypes on one device; no DTensors.
        norm_type: Positive p of the p-norm; `math.inf` for the largest absolute value.

    Returns:
        Scalar in fp64 for each tensor: NaN if an element is NaN, 0 for a tensor without elements.
    """
    if not tensors:
        return []
    pieces: list[Tensor] = []
    counts = []
    for x in tensors:
        count = 1
        if x.numel() > _PIECE and x.device.type == "cpu" and x.dtype != torch.float64:
            count = -(-x.numel() // _PIECE)
            pieces += x.reshape(-1).tensor_split(count)
        else:
            pieces.append(x if x.numel() or math.isfinite(norm_type) else x.new_zeros(()))
        counts.append(count)
    of_pieces = iter(torch._foreach_norm(pieces, norm_type, dtype=torch.float64))  # noqa: SLF001
    norms = []
    for count in counts:
        norm = next(of_pieces)
        if count > 1:
            parts = torch.stack([norm, *islice(of_pieces, count - 1)])
            norm = torch.linalg.vector_norm(parts, norm_type)
        norms.append(norm)
    return norms
