"""Which samples of a batch a rank has, and how a module's tensor is made of them."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hp_train.jobs.events import Rows
from hp_train.jobs.parts import placed, whole
from hp_train.jobs.sketch import Digest, digest_rows

_TOKENS = ("input_ids", "tokens", "[0]")
_SMALL = 1 << 16
"""Most tokens of a batch that are written down themselves."""


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested tuples, lists, mappings and dataclasses, with paths."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{name}[{index}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            path = f"{name}.{item.name}" if name else item.name
            yield from tensors_in(getattr(value, item.name), path)


def batch_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """What tells the samples of a call of a root module apart: its tokens, or its first tensor."""
    given = [*tensors_in(args), *tensors_in(kwargs)]
    laid = [(name, tensor) for name, tensor in given if tensor.ndim >= 2]
    tokens = [(n, t) for n, t in laid if not t.is_floating_point() and t.dtype != torch.bool]
    named = [t for name, t in tokens if name in _TOKENS]
    return next(iter(named or [t for _, t in tokens] or [t for _, t in laid]), None)


def hashes(values: Tensor) -> tuple[str, ...]:
    """A name for each sample, `[N, ...]`, that is the same where all bits are."""
    rows = values.detach().reshape(values.shape[0], -1).contiguous().cpu()
    raw = rows.view(torch.uint8).numpy()
    return tuple(hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest() for row in raw)


class Samples:
    """The samples of one call of a root module.

    Args:
        batch: Its tokens, `[samples, length]`, or whatever first tensor it was given.
        call: Which call in this step and process.
    """

    def __init__(self, batch: Tensor, call: int) -> None:
        local = batch.to_local() if isinstance(batch, DTensor) else batch
        self._call, self._local = call, local
        self._hashes = hashes(local)
        self.has_tokens = not local.is_floating_point()
        self.names = (
            self._hashes if self.has_tokens else tuple(f"{call}.{i}" for i in range(len(local)))
        )
        self._length = local.shape[1]

    def rows(self, step: int) -> Rows:
        """What the root module was given."""
        small = self.has_tokens and self._local.numel() <= _SMALL
        tokens = tuple(map(tuple, self._local.flatten(1).tolist())) if small else ()
        return Rows(step, self._call, self.names, inputs=self._hashes, tokens=tokens)

    def digest(self, tensor: Tensor) -> tuple[tuple[int, ...], Digest] | None:
        """Digest a tensor of some module, sample by sample.

        Returns:
            Shape of one sample, and digests; None where the tensor is not made of samples, or is a
            sum of which ranks have terms.
        """
        values, box, shape = tensor.detach(), None, tuple(tensor.shape)
        if isinstance(tensor, DTensor):
            if any(placement.is_partial() for placement in tensor.placements):
                return None
            values, boxes, shape = placed(tensor)
            if len(boxes) != 1 or boxes[0][1][0] != (0, shape[0]):
                return None
            box = boxes[0][1]
        laid = self._by_sample(values, shape)
        if laid is None:
            return None
        values, dims = laid
        sizes = [shape[dim] for dim in dims] if dims else list(values.shape[1:])
        spans = tuple(box[dim] for dim in dims) if box and dims else whole(values.shape[1:])
        return tuple(sizes), digest_rows(values, spans, self.names)

    def _by_sample(
        self, values: Tensor, shape: tuple[int, ...]
    ) -> tuple[Tensor, tuple[int, ...]] | None:
        """Lay a tensor as `[samples, ...]`; and which dims of it follow that of samples."""
        count, length = len(self.names), self._length
        if values.ndim >= 1 and shape[0] == count:
            return values, tuple(range(1, values.ndim))
        if values.ndim >= 2 and shape[1] == count:
            return values.transpose(0, 1), (0, *range(2, values.ndim))
        if values.ndim >= 1 and shape[0] == count * length:
            return values.unflatten(0, (count, length)), ()
        return None
