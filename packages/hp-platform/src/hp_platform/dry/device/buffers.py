"""Buffers of the host that the device copies from or to while the host goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor


class Buffers:
    """Storages on the host that asynchronous copies have named, with their numbers in the trace."""

    def __init__(self) -> None:
        self._numbers: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()
        self._count = 0

    def number(self, host: Tensor) -> int:
        """Return the number of a tensor's storage, which is new if it was not named before."""
        storage = host.untyped_storage()
        if storage not in self._numbers:
            self._numbers[storage] = self._count
            self._count += 1
        return self._numbers[storage]

    def among(self, tensors: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yield those of `tensors` whose storage was named, with its number."""
        if not self._numbers:
            return
        for x in tensors:
            number = self._numbers.get(x.untyped_storage())
            if number is not None:
                yield number, x
