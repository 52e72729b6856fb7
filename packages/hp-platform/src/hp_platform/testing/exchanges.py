"""Record of the exchanges of a rank, taken from its operators."""

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
    """Collective, send or receive of this rank.

    Attributes:
        kind: `"all_to_all"`, `"all_gather"`, `"reduce_scatter"`, `"all_reduce"`, `"broadcast"`,
            `"barrier"`, `"send"` or `"recv"`.
        group: Name of the group.
        num_bytes: Bytes that this rank sends to others. A reduction counts the bytes of the best
            algorithm: 2 * b * (N - 1) / N, rounded up, for an all-reduce of b bytes over N ranks. A
            broadcast, a barrier and a receive count 0.
        dtype: Dtype of the tensors.
    """

    kind: str
    group: str
    num_bytes: int
    dtype: torch.dtype


@contextmanager
def record_exchanges() -> Iterator[list[Exchange]]:
    """Yield a list of the exchanges of this thread in the context, in forward and backward.

    Tests compare sums of `num_bytes` with formulas of costs, and the number of exchanges of each
    kind with the expected number. Bytes are those of the tensors, without overhead of a backend.

    Raises:
        ValueError: From an operator that is an unknown collective.
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


# Exchange of each operator, from its arguments in torch's order.
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
