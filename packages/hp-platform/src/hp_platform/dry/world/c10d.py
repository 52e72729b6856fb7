"""What each operator of c10d asks for, as `Operation`s."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from hp_platform._internals import dry_world
from hp_platform.dry.world.exchange import Operation

Given = dict[str, Any]


def operations_of(name: str, given: Given) -> list[Operation]:
    """What an operator asks for; more than one if they are started as one.

    Args:
        name: Name of the operator, without `c10d::`.
        given: Arguments of the call, by name.

    Raises:
        NotImplementedError: If nobody has said what it does.
    """
    read = _READERS.get(name)
    if read is None:
        raise NotImplementedError(f"c10d::{name} is not known to dry runs")
    return read(given)


def _reduction(given: Given) -> str:
    return dry_world.reduction_of(given["reduce_op"])


def _all_reduce(given: Given) -> list[Operation]:
    reduction = _reduction(given)
    return [Operation("all_reduce", [x], [x], reduction) for x in given["tensors"]]


def _reduce(given: Given) -> list[Operation]:
    x = given["tensors"][0]
    return [Operation("reduce", [x], [x], _reduction(given), root=given["root_rank"])]


def _broadcast(given: Given) -> list[Operation]:
    x = given["tensors"][0]
    return [Operation("broadcast", [x], [x], root=given["root_rank"])]


def _all_gather(given: Given) -> list[Operation]:
    pairs = zip(given["output_tensors"], given["input_tensors"], strict=True)
    return [Operation("all_gather", [x], outputs) for outputs, x in pairs]


def _all_gather_coalesced(given: Given) -> list[Operation]:
    """Lists of one output per input, for each member; as torch has it, the other way around."""
    lists, inputs = given["output_lists"], given["input_list"]
    return [
        Operation("all_gather", [x], [outputs[place] for outputs in lists])
        for place, x in enumerate(inputs)
    ]


def _all_gather_base(given: Given) -> list[Operation]:
    return [Operation("all_gather", [given["input_tensor"]], [given["output_tensor"]])]


def _all_gather_bases(given: Given) -> list[Operation]:
    pairs = zip(given["inputs"], given["outputs"], strict=True)
    return [Operation("all_gather", [x], [y]) for x, y in pairs]


def _reduce_scatter(given: Given) -> list[Operation]:
    pairs = zip(given["input_tensors"], given["output_tensors"], strict=True)
    return [Operation("reduce_scatter", inputs, [y], _reduction(given)) for inputs, y in pairs]


def _reduce_scatter_base(given: Given) -> list[Operation]:
    x, y = given["input_tensor"], given["output_tensor"]
    return [Operation("reduce_scatter", [x], [y], _reduction(given))]


def _reduce_scatter_bases(given: Given) -> list[Operation]:
    pairs = zip(given["inputs"], given["outputs"], strict=True)
    return [Operation("reduce_scatter", [x], [y], _reduction(given)) for x, y in pairs]


def _all_to_all(given: Given) -> list[Operation]:
    inputs, outputs = given["input_tensors"], given["output_tensors"]
    return [Operation("all_to_all", inputs, outputs)]


def _all_to_all_base(given: Given) -> list[Operation]:
    return [
        Operation(
            "all_to_all",
            [given["input"]],
            [given["output"]],
            input_splits=given["input_split_sizes"],
            output_splits=given["output_split_sizes"],
        )
    ]


def _gather(given: Given) -> list[Operation]:
    outputs = _flat(given["output_tensors"])
    return [Operation("gather", given["input_tensors"], outputs, root=given["root_rank"])]


def _scatter(given: Given) -> list[Operation]:
    inputs = _flat(given["input_tensors"])
    return [Operation("scatter", inputs, given["output_tensors"], root=given["root_rank"])]


def _send(given: Given) -> list[Operation]:
    return [Operation("send", given["tensors"], peer=given["dst"], tag=given["tag"])]


def _receive(given: Given) -> list[Operation]:
    return [Operation("recv", (), given["tensors"], peer=given["src"], tag=given["tag"])]


def _barrier(_: Given) -> list[Operation]:
    return [Operation("barrier")]


def _flat(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [*chain.from_iterable(lists)]


_READERS: dict[str, Callable[[Given], list[Operation]]] = {
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce,
    "reduce_": _reduce,
    "broadcast_": _broadcast,
    "allgather_": _all_gather,
    "allgather_coalesced_": _all_gather_coalesced,
    "_allgather_base_": _all_gather_base,
    "allgather_into_tensor_coalesced_": _all_gather_bases,
    "reduce_scatter_": _reduce_scatter,
    "_reduce_scatter_base_": _reduce_scatter_base,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_bases,
    "alltoall_": _all_to_all,
    "alltoall_base_": _all_to_all_base,
    "gather_": _gather,
    "scatter_": _scatter,
    "send": _send,
    "recv_": _receive,
    "barrier": _barrier,
    "monitored_barrier_": _barrier,
}
