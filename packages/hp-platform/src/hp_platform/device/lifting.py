"""A job in float64: parameters, factories and casts to shorter floats give float64 instead.

So what remains of the rounding of a job is 1e-16, and what differs by more is a mistake.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_SHORT = frozenset({torch.float32, torch.bfloat16, torch.float16})
_CASTS = frozenset({torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16})


class Lifting(TorchFunctionMode):
    """Where a shorter float is asked for, float64 is given."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch with float64 in place of shorter floats."""
        if func in _CASTS:
            return args[0].double()
        return func(*map(lifted, args), **{k: lifted(v) for k, v in (kwargs or {}).items()})


@contextmanager
def lifting() -> Iterator[None]:
    """Compute in float64 for a while, in this thread; see :func:`lift`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Lifting():
            yield
    finally:
        torch.set_default_dtype(before)


def lift() -> None:
    """Compute in float64 from now on, in this thread.

    Autocast leaves float64 as it is, so nothing is to be done about that.
    """
    torch.set_default_dtype(torch.float64)
    torch.set_default_dtype = lambda _dtype: None
    Lifting().__enter__()  # for as long as the program runs


def lifted(value: Any) -> Any:
    """float64 in place of a shorter float; anything else as it is."""
    return torch.float64 if isinstance(value, torch.dtype) and value in _SHORT else value
