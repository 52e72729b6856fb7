"""Operators between ranks as `Operation`s: operators of c10d, and functional collectives.

Functional collectives return new tensors, and a wait names the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hp_dry._internals import (
    Arguments,
    Keywords,
    Operator,
    reduction_of,
    schema_of,
)
from hp_dry.recording.tensors import tensors_in
from hp_dry.world.exchange import Operation


class _Reading(NamedTuple):
    """Names of the arguments of an operator with the tensors of its operation.

    Attributes:
        op: Name of the operation, as in `trace.Collective`.
        gives: Name of the argument that this rank sends; "" if it sends nothing.
        gets: Name of the argument that is written; "" if nothing is written.
        is_each: Whether both arguments are lists, and each pair of items is a separate operation.
    """

    op: str
    gives: str = ""
    gets: str = ""
    is_each: bool = False


_READINGS = {
    "allreduce_": _Reading("all_reduce", "tensors", "tensors", is_each=True),
    "allreduce_coalesced_": _Reading("all_reduce", "tensors", "tensors", is_each=True),
    "reduce_": _Reading("reduce", "tensors", "tensors"),
    "broadcast_": _Reading("broadcast", "tensors", "tensors"),
    "allgather_": _Reading("all_gather", "input_tensors", "output_tensors", is_each=True),
    "allgather_coalesced_": _Reading("all_gather", "input_list", "output_lists", is_each=True),
    "_allgather_base_": _Reading("all_gather", "input_tensor", "output_tensor"),
    "allgather_into_tensor_coalesced_": _Reading("all_gather", "inputs", "outputs", is_each=True),
    "reduce_scatter_": _Reading("reduce_scatter", "input_tensors", "output_tensors", is_each=True),
    "_reduce_scatter_base_": _Reading("reduce_scatter", "input_tensor", "output_tensor"),
    "reduce_scatter_tensor_coalesced_": _Reading(
        "reduce_scatter", "inputs", "outputs", is_each=True
    ),
    "alltoall_": _Reading("all_to_all", "input_tensors", "output_tensors"),
    "alltoall_base_": _Reading("all_to_all", "input", "output"),
    "gather_": _Reading("gather", "input_tensors", "output_tensors"),
    "scatter_": _Reading("scatter", "input_tensors", "output_tensors"),
    "send": _Reading("send", gives="tensors"),
    "recv_": _Reading("recv", gets="tensors"),
    "barrier": _Reading("barrier"),
    "monitored_barrier_": _Reading("barrier"),
}


Asked: TypeAlias = tuple[list[Operation], object]
"""Operations of an operator, and its result."""

_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


def operations_of(name: str, given: Keywords) -> list[Operation]:
    """List the operations of an operator; several operations start as one batch.

    Args:
        name: Name of the operator, without `c10d::`.
        given: Arguments of the call, by name.

    Raises:
        NotImplementedError: If the operator is not listed.
    """
    reading = _READINGS.get(name)
    if reading is None:
        raise NotImplementedError(f"c10d::{name} is not known to dry runs")
    inputs = given[reading.gives] if reading.gives else ()
    outputs = given[reading.gets] if reading.gets else ()
    if name == "allgather_coalesced_":  # for each member a list of one output per input
        outputs = list(zip(*outputs, strict=True))
    pairs = zip(inputs, outputs, strict=True) if reading.is_each else [(inputs, outputs)]
    return [asked(reading.op, tensors_in(x), tensors_in(y), given) for x, y in pairs]


def asked(
    op: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], given: Keywords
) -> Operation:
    """Make an operation from its tensors and the other arguments of its operator in c10d.

    Args:
        op: Name of the operation.
        inputs: Tensors that this rank sends.
        outputs: Tensors that are written.
        given: Arguments of the call, by name.
    """
    return Operation(
        op,
        inputs,
        outputs,
        reduction=reduction_of(given["reduce_op"]) if "reduce_op" in given else "",
        root=given.get("root_rank", -1),
        peer=given.get("dst", given.get("src", -1)),
        tag=given.get("tag", 0),
        input_splits=[*map(int, given.get("input_split_sizes", ()))],
        output_splits=[*map(int, given.get("output_split_sizes", ()))],
    )


def arguments_by_name(func: Operator, args: Arguments, kwargs: Keywords) -> dict[str, Any]:
    """Return the arguments of a call of an operator by name, without omitted arguments."""
    names = (argument.name for argument in schema_of(func).arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def functional_operation(func: Operator, args: Arguments, kwargs: Keywords) -> Asked | None:
    """Return the operations of an operator of `_c10d_functional`; None for other operators.

    Args:
        func: Overload of an operator.
        args: Positional arguments of the call, with tensors of the device.
        kwargs: Keyword arguments of the call.
    """
    if func.namespace != "_c10d_functional":
        return None
    given = arguments_by_name(func, args, kwargs)
    name = schema_of(func).name.removeprefix("_c10d_functional::")
    op = _FUNCTIONAL.get(name.rstrip("_").removesuffix("_out").removesuffix("_coalesced"))
    if op is None:
        raise NotImplementedError(f"_c10d_functional::{name} is not known to dry runs")
    if op == "broadcast":
        given["root_rank"] = given.pop("src")
    inputs = given["inputs"] if "inputs" in given else [given["input"]]
    outputs = inputs if name.endswith("_") else [_result(op, x, given) for x in inputs]
    operations = [asked(op, [x], [y], given) for x, y in zip(inputs, outputs, strict=True)]
    return operations, outputs if "inputs" in given else outputs[0]


def _result(op: str, x: Tensor, given: Keywords) -> Tensor:
    """Return the tensor that an operator writes: the argument `out`, or a new tensor."""
    out: Tensor | None = given.get("out")
    if out is not None:
        return out
    shape = list(x.shape)
    if op == "all_gather":
        shape[0] *= given["group_size"]
    elif op == "reduce_scatter":
        shape[0] //= given["group_size"]
    elif op == "all_to_all":
        shape[0] = sum(map(int, given["output_split_sizes"]))
    return torch.empty(shape, dtype=x.dtype, device="meta")
