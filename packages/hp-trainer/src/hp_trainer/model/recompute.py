"""Activation checkpointing: parts of the model that run again in backward instead of being kept.

A part that runs again takes the decisions of its routers from its first run. Nothing in the model
draws from a generator, so there is no state of one to restore.

Selective recomputation goes by operator: of a block that runs again, attention proper and the
products of experts in groups, which cost most for what they keep, are kept (Korthikanti et al.
2022 have it the other way round for attention that keeps its scores, which flash attention does
not). What a kernel of one's own launches is kept if its operator is named like those of torch.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, Final, Literal

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hp_expert import save_routing
from hp_platform._internals import TorchDispatchMode

Recompute = Literal["none", "attention", "feed_forward", "selective", "full"]
"""What of a block is computed again."""

_KEPT: Final = ("attention", "attn", "grouped_mm")
"""Parts of the names of operators whose results are kept by "selective"."""


def recomputed_but_products(part: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call a part of the model and keep its arguments, attention and products of experts."""
    return recomputed(part, *args, context_fn=partial(save_routing, _contexts))


def _contexts() -> tuple["_First", "_Again"]:
    kept: _Kept = defaultdict(deque)
    return _First(kept), _Again(kept)


_Kept = dict[Any, deque["_Result"]]
"""What was kept of each operator, in the order of its calls."""


class _Result:
    """The result of an operator.

    What an operator has given may be overwritten: parts of attention are added up in the first of
    them, and sinks weigh in place. So operators that write are looked at as well, and what is kept
    is copied before one writes to its memory, and not where none does. torch's own modes of
    selective checkpointing refuse that, and they take an operator that only the second run has for
    a mistake: FSDP gathers parameters inside of a block, and may have had them in the first run.

    Args:
        given: A tensor, or several.
    """

    def __init__(self, given: Any) -> None:
        is_one = isinstance(given, Tensor)
        self._kind = type(given)
        # Others than those that the caller has: those come to be of a graph.
        self._values = [_other(value) for value in ([given] if is_one else given)]

    def storages(self) -> Iterator[int]:
        """Yield where the memory of its tensors is, if they have any."""
        for value in self._values:
            if isinstance(value, Tensor) and (address := value.untyped_storage().data_ptr()):
                yield address

    def copy(self) -> None:
        """Have memory of its own."""
        self._values = [v.clone() if isinstance(v, Tensor) else v for v in self._values]

    def value(self) -> Any:
        """Return what the operator gave."""
        return self._values[0] if issubclass(self._kind, Tensor) else self._kind(self._values)


def _other(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


class _Mode(TorchDispatchMode):
    """One of the two runs of a part.

    Args:
        kept: What is kept for the second run.
    """

    def __init__(self, kept: _Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch that what is compiled inside may run below this mode."""
        return True


class _First(_Mode):
    """Keeps what some operators give, and runs all.

    Args:
        kept: Filled.
    """

    def __init__(self, kept: _Kept) -> None:
        super().__init__(kept)
        self._by_storage: dict[int, _Result] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator."""
        kwargs = kwargs or {}
        if self._by_storage and _writes(func):
            for value in (*args, *kwargs.values()):
                self._save(value)
        given = func(*args, **kwargs)
        if _is_kept(func):
            result = _Result(given)
            self._kept[func].append(result)
            self._by_storage |= dict.fromkeys(result.storages(), result)
        return given

    def _save(self, value: Any) -> None:
        """Copy what is kept in the memory of an argument, before it may be written to."""
        if isinstance(value, list | tuple):
            for each in value:
                self._save(each)
        elif isinstance(value, Tensor):
            result = self._by_storage.get(value.untyped_storage().data_ptr())
            if result is not None:
                for storage in [s for s, of in self._by_storage.items() if of is result]:
                    del self._by_storage[storage]
                result.copy()

    def __exit__(self, *error: object) -> None:
        """Forget storages: nothing is written to any more."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._by_storage.clear()


class _Again(_Mode):
    """Gives what was kept of some operators, each once, and runs all others."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, or take what it gave."""
        if not _is_kept(func):
            return func(*args, **(kwargs or {}))
        if not self._kept[func]:
            raise RuntimeError(
                f"{func} must run no more often in the second run of a block than in the first"
            )
        return self._kept[func].popleft().value()


@cache
def _is_kept(operator: Any) -> bool:
    name = str(operator)
    return "backward" not in name and any(word in name for word in _KEPT)


@cache
def _writes(operator: Any) -> bool:
    return bool(operator._schema.is_mutable)  # noqa: SLF001 - torch names no other way


def recomputed(
    part: Callable[..., Tensor],
    *args: Any,
    context_fn: Callable[[], Any] = save_routing,
    **kwargs: Any,
) -> Tensor:
    """Call a part of the model and keep nothing but its arguments for its backward.

    Args:
        part: Part of the model.
        *args: Its arguments.
        context_fn: As `torch.utils.checkpoint.checkpoint` takes it.
        **kwargs: Further arguments of the part.
    """
    result: Tensor = checkpoint(
        part,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=context_fn,
        **kwargs,
    )
    return result
