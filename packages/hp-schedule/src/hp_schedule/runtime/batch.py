"""Batches cut into microbatches, and the results of runs over them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hp_schedule.timeline import Timeline

BatchDims = Sequence[int | None]
"""For each positional argument the dim to cut along; None hands it to every microbatch whole."""


def split_args(
    args: Sequence[object], num: int, *, dims: BatchDims | None = None
) -> list[list[Any]]:
    """Cut positional arguments into microbatches.

    Tensors are cut as even as can be, the longer parts first; inside lists, tuples and dicts as
    well. What is no tensor goes to every microbatch as it is.

    Args:
        args: Positional arguments of the whole batch.
        num: Number of microbatches.
        dims: Default: 0 for every argument.

    Returns:
        The arguments of each microbatch.

    Raises:
        ValueError: If there is not one dim per argument, or a tensor is shorter than num.
    """
    if dims is None:
        dims = [0] * len(args)
    if len(dims) != len(args):
        raise ValueError(f"len(args_batch_dim) ({len(dims)}) must equal len(args) ({len(args)})")
    columns = [
        _split(arg, num, dim, name=f"argument {index}")
        for index, (arg, dim) in enumerate(zip(args, dims, strict=True))
    ]
    return [[column[index] for column in columns] for index in range(num)]


def split_kwargs(
    kwargs: Mapping[str, object], num: int, *, dims: Mapping[str, int | None] | None = None
) -> list[dict[str, Any]]:
    """Cut keyword arguments into microbatches, as `split_args` does; dims not named are 0.

    Raises:
        ValueError: If a tensor is shorter than num or lacks the dim.
    """
    dims = {} if dims is None else dims
    columns = {
        name: _split(value, num, dims.get(name, 0), name=f"argument {name}")
        for name, value in kwargs.items()
    }
    return [{name: column[index] for name, column in columns.items()} for index in range(num)]


def concat_outputs(outputs: Sequence[Any], *, dim: int = 0) -> Any:
    """Put the outputs of microbatches together; the inverse of the cut.

    Args:
        outputs: Output of each microbatch: a tensor, or a sequence or dict of such.
        dim: Dimension along which tensors are concatenated; scalars become a vector.

    Returns:
        In the structure of one microbatch's output; None without outputs.
    """
    if not outputs:
        return None
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(list(outputs), dim) if first.dim() else torch.stack(list(outputs))
    if isinstance(first, (tuple, list)):
        return tuple(concat_outputs(parts, dim=dim) for parts in zip(*outputs, strict=True))
    if isinstance(first, Mapping):
        return {name: concat_outputs([part[name] for part in outputs], dim=dim) for name in first}
    return list(outputs)


class PipelineResult:
    """Result of a run on one rank.

    Args:
        losses: See the attribute.
        outputs: See the attribute.
        timeline: Returns the spans.
        concat_dim: Dimension along which outputs are put together.

    Attributes:
        losses: One detached scalar per microbatch on the rank of the last stage, not scaled; empty
            elsewhere, and without both loss function and backwards.
        outputs: Outputs of the last stage for each microbatch, detached; empty elsewhere, and in
            training unless asked for.
    """

    def __init__(
        self,
        losses: Sequence[Tensor],
        outputs: Sequence[Any],
        *,
        timeline: Callable[[], Timeline],
        concat_dim: int = 0,
    ) -> None:
        self.losses = list(losses)
        self.outputs = list(outputs)
        self._timeline = timeline
        self._concat_dim = concat_dim

    @property
    def output(self) -> Any:
        """Return the outputs of all microbatches in one; None where there are none."""
        return concat_outputs(self.outputs, dim=self._concat_dim)

    @property
    def timeline(self) -> Timeline:
        """Return this rank's spans, in seconds since the epoch; empty if nothing was recorded.

        On CUDA the first look waits until the device has got to the end of the run.
        """
        return self._timeline()


def _split(value: object, num: int, dim: int | None, *, name: str) -> Sequence[object]:
    if dim is None or value is None:
        return [value] * num
    if isinstance(value, Tensor):
        if not -value.dim() <= dim < value.dim():
            raise ValueError(f"batch dim ({dim}) of {name} must be a dim of {list(value.shape)}")
        if value.shape[dim] < num:
            raise ValueError(
                f"size ({value.shape[dim]}) of {name} along dim {dim} must be >= the number of "
                f"microbatches ({num})"
            )
        return value.tensor_split(num, dim)
    if isinstance(value, Mapping):
        parts = {key: _split(part, num, dim, name=name) for key, part in value.items()}
        return [{key: part[index] for key, part in parts.items()} for index in range(num)]
    if isinstance(value, (tuple, list)):
        columns = [_split(part, num, dim, name=name) for part in value]
        rows = [[column[index] for column in columns] for index in range(num)]
        # Named tuples take their fields one by one.
        make: Callable[..., object] = getattr(value, "_make", type(value))
        return [make(row) for row in rows]
    return [value] * num
