"""Functional collectives on tensors of the device: new results, that are waited for by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hp_platform._internals.dry import schema_of
from hp_platform.dry.world.c10d import asked
from hp_platform.dry.world.exchange import Operation

Asked = tuple[list[Operation], Any]
"""What is to be done, and what the operator returns."""

_OPERATIONS = {
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


def arguments_by_name(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments that an overload of an operator is given; those left out are not in it."""
    names = (argument.name for argument in schema_of(func).arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def functional_operation(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Asked | None:
    """What an operator of `_c10d_functional` asks for; None if it is not one of these.

    Args:
        func: Overload of an operator.
        args: Positional arguments of the call, with tensors of the device.
        kwargs: Keyword arguments of the call.
    """
    if func.namespace != "_c10d_functional":
        return None
    given = arguments_by_name(func, args, kwargs)
    name = schema_of(func).name.removeprefix("_c10d_functional::")
    op = _OPERATIONS.get(name.rstrip("_").removesuffix("_out").removesuffix("_coalesced"))
    if op is None:
        raise NotImplementedError(f"_c10d_functional::{name} is not known to dry runs")
    if op == "broadcast":
        given["root_rank"] = given.pop("src")
    inputs = given["inputs"] if "inputs" in given else [given["input"]]
    outputs = inputs if name.endswith("_") else [_result(op, x, given) for x in inputs]
    operations = [asked(op, [x], [y], given) for x, y in zip(inputs, outputs, strict=True)]
    return operations, outputs if "inputs" in given else outputs[0]


def _result(op: str, x: Tensor, given: dict[str, Any]) -> Any:
    """The tensor that an operator writes: a new one, unless it is given one."""
    if given.get("out") is not None:
        return given["out"]
    shape = list(x.shape)
    if op == "all_gather":
        shape[0] *= given["group_size"]
    elif op == "reduce_scatter":
        shape[0] //= given["group_size"]
    elif op == "all_to_all":
        shape[0] = sum(map(int, given["output_split_sizes"]))
    return torch.empty(shape, dtype=x.dtype, device="meta")
