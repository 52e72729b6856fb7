"""A record of what a rank sends to others, taken from the operators it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_platform._internals import Arguments, Keywords, group_of
from hp_platform.testing.operators import watch_operators


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective, send or receive of this rank.

    Attributes:
        kind: `"all_to_all"`, `"all_gather"`, `"reduce_scatter"`, `"all_reduce"`, `"broadcast"`,
            `"barrier"`, `"send"` or `"recv"`.
        group: Name of the group.
        num_bytes: What this rank sends to others. Of a reduction what the best algorithm needs: of
            an all-reduce of b bytes over N ranks 2 * b * (N - 1) / N, rounded up. Nothing of a
            broadcast, a barrier or what is received.
        dtype: Dtype of the tensors.
    """

    kind: str
    group: str
    num_bytes: int
    dtype: torch.dtype


@contextmanager
def record_exchanges() -> Iterator[list[Exchange]]:
    """Yield a list of what this thread exchanges in the context, forward and backward alike.

    Sums of `num_bytes` are what a formula of costs must meet, and how many exchanges there are of
    each kind shows a collective too many. Bytes count by the tensors; what a backend adds or saves
    is not seen.

    Raises:
        ValueError: From the operator itself: it is a collective that is not known here.
    """
    exchanges: list[Exchange] = []

    def see(name: str, args: Arguments, kwargs: Keywords) -> None:
        namespace, operator = name.split("::")
        if namespace in _NAMESPACES and operator not in _NO_EXCHANGE:
            if operator not in _RULES:
                raise ValueError(f"operator ({name}) must be one of those known: {sorted(_RULES)}")
            exchanges.append(_RULES[operator](*args, **kwargs))

    with watch_operators(see):
        yield exchanges


_NAMESPACES = ("c10d", "_c10d_functional")
_NO_EXCHANGE = ("wait_tensor", "_wrap_tensor_autograd")


def _exchange(kind: str, group: object, sent: Fraction | int, x: Tensor) -> Exchange:
    name = getattr(group, "group_name", group)
    return Exchange(kind, str(name), -int(-sent // 1), x.dtype)


def _all_to_all(x: Tensor, splits: Sequence[int], group: ProcessGroup) -> Exchange:
    rows = x.shape[0] if x.ndim else 1
    staying = splits[group.rank()] if splits else rows // group.size()
    row = x[:1].nbytes if rows else 0
    return _exchange("all_to_all", group, (rows - staying) * row, x)


def _gathered(group: ProcessGroup, x: Tensor) -> Exchange:
    return _exchange("all_gather", group, x.nbytes * (group.size() - 1), x)


def _scattered(kind: str, group: ProcessGroup, xs: Sequence[Tensor], times: int) -> Exchange:
    sent = Fraction(times * sum(x.nbytes for x in xs) * (group.size() - 1), group.size())
    return _exchange(kind, group, sent, xs[0])


def _p2p(kind: str, xs: Sequence[Tensor], group: ProcessGroup) -> Exchange:
    sent = sum(x.nbytes for x in xs) if kind == "send" else 0
    return _exchange(kind, group, sent, xs[0])


# By operator: the arguments that it is called with, in torch's order.
_RULES: dict[str, Callable[..., Exchange]] = {
    "alltoall_base_": lambda _, x, group, __, splits, *___: _all_to_all(x, splits, group_of(group)),
    "alltoall_": lambda _, xs, group, *__: _exchange(
        "all_to_all",
        group_of(group),
        sum(x.nbytes for i, x in enumerate(xs) if i != group_of(group).rank()),
        xs[0],
    ),
    "_allgather_base_": lambda _, x, group, *__: _gathered(group_of(group), x),
    "allgather_": lambda _, xs, group, *__: _gathered(group_of(group), xs[0]),
    "_reduce_scatter_base_": lambda _, x, group, *__: _scattered(
        "reduce_scatter", group_of(group), [x], 1
    ),
    "allreduce_": lambda xs, group, *_: _scattered("all_reduce", group_of(group), xs, 2),
    "broadcast_": lambda xs, group, *_: _exchange("broadcast", group_of(group), 0, xs[0]),
    "barrier": lambda x, group, *_: _exchange("barrier", group_of(group), 0, x),
    "send": lambda xs, group, *_: _p2p("send", xs, group_of(group)),
    "recv_": lambda xs, group, *_: _p2p("recv", xs, group_of(group)),
    "all_to_all_single": lambda x, _, splits, group: _all_to_all(x, splits, group_of(group)),
    "all_gather_into_tensor": lambda x, _, group: _gathered(group_of(group), x),
    "reduce_scatter_tensor": lambda x, _, __, group: _scattered(
        "reduce_scatter", group_of(group), [x], 1
    ),
    "all_reduce": lambda x, _, group: _scattered("all_reduce", group_of(group), [x], 2),
}
