"""Operators of a thread, intercepted one by one, and the memory of their results."""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hp_platform._internals import Arguments, Keywords, Operator, TorchDispatchMode

Seen: TypeAlias = Callable[[str, tuple[Any, ...], dict[str, Any]], object]
"""Function that is given the name of an operator, its positional and its keyword arguments."""


def watch_operators(seen: Seen) -> AbstractContextManager[object]:
    """Call `seen` before each operator that this thread runs in the context.

    They are the operators below autograd in forward and backward, and collectives. Operators that
    read values on the host, allocate, or send have the names of torch's dispatcher. So a test can
    count them without a GPU.

    Args:
        seen: Function of the name, such as `"aten::nonzero"` or `"aten::index.Tensor"`, and the
            positional and keyword arguments. An exception from it prevents the operator.
    """
    return _Watch(seen)


class _Watch(TorchDispatchMode):
    def __init__(self, seen: Seen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(
        self,
        func: Operator,
        types: object,
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> object:
        self._seen(func.name(), tuple(args), dict(kwargs or {}))
        return func(*args, **kwargs or {})


class LiveBytes(TorchDispatchMode):
    """Context that counts the memory of tensors which this thread makes inside.

    A tensor counts until its memory is freed, also after the context; temporary memory of a kernel
    does not count. Fake tensors of any size, which have no memory, count as well.

    Attributes:
        now: Bytes of the tensors that are alive now.
        peak: Most bytes of tensors that were alive at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Operator,
        types: object,
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> object:
        kwargs = kwargs or {}
        given = {id(storage) for storage in _storages((args, kwargs))}
        result = func(*args, **kwargs)
        for storage in _storages(result):
            if id(storage) not in self._known | given:
                self._known.add(id(storage))
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._forget, id(storage), storage.nbytes())
        return result

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _storages(tensors: object) -> list[torch.UntypedStorage]:
    return [x.untyped_storage() for x in tree_leaves(tensors) if isinstance(x, Tensor)]
