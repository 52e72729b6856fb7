"""Functional collectives on tensors of the device: new results, that are waited for by tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hp_platform._internals.dry import schema_of
from hp_platform.dry.world.exchange import Operation

Asked = tuple[list[Operation], Any]
"""What is to be done, and what the operator returns."""


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
    reader = _READERS.get(name.rstrip("_").removesuffix("_out").removesuffix("_coalesced"))
    if reader is None:
        raise NotImplementedError(f"_c10d_functional::{name} is not known to dry runs")
    in_place = name.endswith("_")
    if "inputs" in given:
        made = [reader(x, given, in_place=in_place) for x in given["inputs"]]
        return [each for each, _ in made], [y for _, y in made]
    operation, y = reader(given["input"], given, in_place=in_place)
    return [operation], y


def _all_reduce(x: Tensor, given: Any, *, in_place: bool) -> tuple[Operation, Tensor]:
    y = x if in_place else _new(x, x.shape)
    return Operation("all_reduce", [x], [y], given["reduce_op"].lower()), y


def _broadcast(x: Tensor, given: Any, *, in_place: bool) -> tuple[Operation, Tensor]:
    y = x if in_place else _new(x, x.shape)
    return Operation("broadcast", [x], [y], root=given["src"]), y


def _all_gather(x: Tensor, given: Any, *, in_place: bool) -> tuple[Operation, Tensor]:
    del in_place
    y = given.get("out")
    if y is None:
        y = _new(x, (given["group_size"] * x.shape[0], *x.shape[1:]))
    return Operation("all_gather", [x], [y]), y


def _reduce_scatter(x: Tensor, given: Any, *, in_place: bool) -> tuple[Operation, Tensor]:
    del in_place
    y = given.get("out")
    if y is None:
        y = _new(x, (x.shape[0] // given["group_size"], *x.shape[1:]))
    return Operation("reduce_scatter", [x], [y], given["reduce_op"].lower()), y


def _all_to_all(x: Tensor, given: Any, *, in_place: bool) -> tuple[Operation, Tensor]:
    del in_place
    outputs, inputs = [[*map(int, given[f"{way}_split_sizes"])] for way in ("output", "input")]
    y = _new(x, (sum(outputs), *x.shape[1:]))
    return Operation("all_to_all", [x], [y], input_splits=inputs, output_splits=outputs), y


def _new(x: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.empty(tuple(shape), dtype=x.dtype, device="meta")


_READERS: dict[str, Callable[..., tuple[Operation, Tensor]]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
}
