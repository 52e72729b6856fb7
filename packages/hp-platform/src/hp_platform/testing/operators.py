"""A look at every operator that a thread runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hp_platform._internals import TorchDispatchMode


@contextmanager
def watch_operators(
    seen: Callable[[str, tuple[Any, ...], dict[str, Any]], object],
) -> Iterator[None]:
    """Call `seen` before each operator that this thread runs in the context.

    Those are the operators below autograd, of forward and backward, and collectives: what reads
    values on the host, allocates, or sends is there under the name torch's dispatcher gives it.
    What a test counts this way it finds without a GPU.

    Args:
        seen: Called with the name, such as `"aten::nonzero"` or `"aten::index.Tensor"`, and the
            positional and keyword arguments. An exception from it ends the operator.
    """
    with _Watch(seen):
        yield


class _Watch(TorchDispatchMode):
    def __init__(self, seen: Callable[[str, tuple[Any, ...], dict[str, Any]], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._seen(func.name(), args, kwargs)
        return func(*args, **kwargs)
