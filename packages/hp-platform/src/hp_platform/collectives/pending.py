"""`Pending`: a running operation with its result and its buffers."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Generic, TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
_dropped: dict[int, tuple[tuple[dist.Work, ...], tuple[Tensor, ...]]] = {}
_serial = count()


class Pending(Generic[T]):
    """Result of an operation that may still be running.

    It owns the buffers that the operation reads and writes. Without a `wait` they live until the
    operation has finished.

    Buffers must outlive their operation even if no code waits for it: the backend may still read or
    write them. They are stored here until the operation reports completion. Gloo reports the
    completion of a send or receive only to a wait, so that buffers of dropped sends and receives
    are stored until `shutdown`.
    """

    __slots__ = ("_buffers", "_finish", "_result", "_waited", "_works")

    def __init__(
        self,
        result: T,
        *,
        works: Sequence[dist.Work] = (),
        buffers: Sequence[Tensor] = (),
        finish: Callable[[], object] | None = None,
    ) -> None:
        """Own an operation.

        Args:
            result: Value that `wait` returns.
            works: Handles that must complete before the result may be used.
            buffers: All tensors that the operation reads or writes, inputs included.
            finish: Function that is called once after the handles have completed, for example to
                copy from the host.
        """
        self._waited = False
        self._result: T | None = result
        self._works = tuple(works)
        self._buffers = tuple(buffers)
        self._finish = finish
        release_completed()

    def done(self) -> bool:
        """Tell whether `wait` would return at once.

        The answer may be False too long: Gloo reports a finished send or receive only to a wait.
        """
        return self._waited or all(work.is_completed() for work in self._works)

    def wait(self) -> T:
        """Block until the result may be used, release the buffers and return the result.

        On CUDA the current stream waits, not the host.

        Raises:
            RuntimeError: On a second call, or if the operation failed.
        """
        if self._waited:
            raise RuntimeError("wait() must be called once: the result was handed out before")
        self._waited = True
        result, finish = self._result, self._finish
        for work in self._works:
            work.wait()
        if finish is not None:
            finish()
        self._works, self._buffers, self._finish, self._result = (), (), None, None
        return result  # type: ignore[return-value]  # None only after a wait

    def __del__(self) -> None:
        if works := getattr(self, "_works", ()):
            _dropped[next(_serial)] = (works, self._buffers)


def release_completed(*, everything: bool = False) -> int:
    """Free the buffers of dropped operations that have finished; count the other operations."""
    # A copy, since __del__ may add an entry from any thread meanwhile.
    for key, (works, _) in list(_dropped.items()):
        if everything or all(work.is_completed() for work in works):
            _dropped.pop(key, None)
    return len(_dropped)
