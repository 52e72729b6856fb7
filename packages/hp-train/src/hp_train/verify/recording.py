"""Recordings of runs: every rank writes its parts, and a reader puts them together later.

Every rank writes the parts that it holds; whoever reads them needs neither its groups nor its
number of ranks. So a job of any layout can be compared with a job of any other, after both ended.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

_Saved = dict[str, dict[str, list[tuple[Tensor, tuple[int, ...], tuple[int, ...]]]]]
"""Quantity -> name -> parts as (local values, shape of the whole, offset)."""
_INDEX = "index"


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A box of a tensor that is spread over ranks.

    Attributes:
        local: The values here.
        shape: Shape of the whole tensor.
        offset: Where the box begins in the whole, one number per dim.
    """

    local: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse a box that is not inside the whole."""
        sizes = tuple(self.local.shape)
        fits = len(sizes) == len(self.shape) == len(self.offset) and all(
            o >= 0 and o + n <= whole
            for o, n, whole in zip(self.offset, sizes, self.shape, strict=True)
        )
        if not fits:
            raise ValueError(
                f"offset {self.offset} + local {sizes} must be inside shape {self.shape}"
            )


def parts_of(value: Tensor | Part) -> list[Part]:
    """Say which parts of a tensor this rank holds.

    Args:
        value: A part; a plain tensor, which is whole; or a DTensor. One that is neither sharded
            evenly along dims nor replicated is put together first: all ranks of its mesh must
            then come here.
    """
    if isinstance(value, Part):
        return [value]
    if not isinstance(value, DTensor):
        return [Part(value.detach(), tuple(value.shape), (0,) * value.ndim)]
    if any(type(placement) not in (Shard, Replicate) for placement in value.placements):
        return parts_of(value.full_tensor())
    local = value.to_local().detach()
    chunks = value.__create_chunk_list__() if local.numel() else []
    return [Part(local, tuple(value.shape), tuple(chunk.offsets)) for chunk in chunks]


class Recorder:
    """Writes down one rank's part of every step.

    Args:
        directory: The same for all ranks of a run, on storage that the reader sees.
        rank: Rank of this process.
        quantities: What is wanted; the rest is dropped. None: all.
        tensor_steps: Steps, counted from 1, whose tensors of more than one value are wanted; None:
            all.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        quantities: frozenset[str] | None = None,
        tensor_steps: frozenset[int] | None = None,
    ) -> None:
        self._directory, self._rank = directory, rank
        self._quantities, self._tensor_steps = quantities, tensor_steps
        self._step = 1
        self._saved: _Saved = {}

    def wants(self, quantity: str) -> bool:
        """Tell whether anything of a quantity is kept in this step, scalars aside."""
        of_step = self._tensor_steps is None or self._step in self._tensor_steps
        return of_step and self._is_chosen(quantity)

    def _is_chosen(self, quantity: str) -> bool:
        return self._quantities is None or quantity in self._quantities

    def add(
        self,
        quantity: str,
        tensors: Mapping[str, Tensor | Part],
        *,
        in_every_step: bool = False,
    ) -> None:
        """Note down tensors of this step as they are now; they are copied.

        Args:
            quantity: Kind of what is compared, for example "gradient". The order of quantities and
                of names is the one in which a difference is looked for first.
            tensors: Tensors by name in the whole model. Ranks may add different names, and several
                parts of the same one.
            in_every_step: Whether to keep them in steps whose tensors are not wanted, too.
        """
        if not (self._is_chosen(quantity) if in_every_step else self.wants(quantity)):
            return
        names = self._saved.setdefault(quantity, {})
        for name, tensor in tensors.items():
            for part in parts_of(tensor):
                copied = part.local.detach().to("cpu", copy=True).contiguous()
                names.setdefault(name, []).append((copied, part.shape, part.offset))

    def add_scalar(self, quantity: str, value: float) -> None:
        """Note down a number that is the same on all ranks; kept in every step."""
        if self._is_chosen(quantity):
            part = (torch.tensor(value, dtype=torch.float64), (), ())
            self._saved.setdefault(quantity, {})[""] = [part]

    def end_step(self) -> None:
        """Write what was noted down; the next step begins."""
        folder = self._directory / f"step-{self._step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{self._rank:05d}.pt"
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        torch.save(_packed(self._saved), draft)
        draft.replace(path)
        self._saved = {}
        self._step += 1


@dataclass(frozen=True, slots=True, eq=False)
class RecordedStep:
    """A step put together.

    Attributes:
        index: Counted from 1.
        tensors: Quantity -> name -> whole tensor, in the order of recording; a scalar is named "".
        flaws: Sentences about ranks that contradict each other and parts that nobody recorded.
    """

    index: int
    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    flaws: Sequence[str] = ()


def read_steps(directory: Path) -> Iterator[RecordedStep]:
    """Yield the steps of a recording, one at a time.

    Args:
        directory: Directory of the recorders.

    Raises:
        FileNotFoundError: If nothing was recorded there.
    """
    folders = sorted(directory.glob("step-*"))
    if not folders:
        raise FileNotFoundError(f"{directory} must hold a recording")
    for folder in folders:
        yield _join(int(folder.name.removeprefix("step-")), sorted(folder.glob("rank-*.pt")))


def _join(index: int, files: Sequence[Path]) -> RecordedStep:
    tensors: dict[str, dict[str, Tensor]] = {}
    flaws: list[str] = []
    ranks: list[tuple[str, _Saved]] = [
        (file.stem, _unpacked(torch.load(file, map_location="cpu", weights_only=True)))
        for file in files
    ]
    quantities = dict.fromkeys(itertools.chain.from_iterable(saved for _, saved in ranks))
    for quantity in quantities:
        wholes: dict[str, _Whole] = {}
        for rank, saved in ranks:
            for name, parts in saved.get(quantity, {}).items():
                for local, shape, offset in parts:
                    if name not in wholes:
                        wholes[name] = _Whole(local, shape)
                    wholes[name].fill(rank, local, shape, offset)
        tensors[quantity] = {name: whole.values for name, whole in wholes.items()}
        for name, whole in wholes.items():
            flaws += [f"{quantity} {name}: {flaw}" for flaw in whole.flaws()]
    return RecordedStep(index, tensors, tuple(flaws))


def _packed(saved: _Saved) -> dict[str, Any]:
    """One tensor for each dtype, and where everything is in it: read in a fifth of the time."""
    flat: dict[str, list[Tensor]] = {}
    index: list[Any] = []
    for quantity, names in saved.items():
        for name, parts in names.items():
            for local, shape, offset in parts:
                dtype = str(local.dtype).removeprefix("torch.")
                flat.setdefault(dtype, []).append(local.reshape(-1))
                index.append((quantity, name, dtype, tuple(local.shape), shape, offset))
    return {_INDEX: json.dumps(index), **{dtype: torch.cat(flat[dtype]) for dtype in flat}}


def _unpacked(packed: dict[str, Any]) -> _Saved:
    saved: _Saved = {}
    taken: Counter[str] = Counter()
    for quantity, name, dtype, sizes, shape, offset in json.loads(packed[_INDEX]):
        begin = taken[dtype]
        taken[dtype] += math.prod(sizes)
        local = packed[dtype][begin : taken[dtype]].view(sizes)
        parts = saved.setdefault(quantity, {}).setdefault(name, [])
        parts.append((local, tuple(shape), tuple(offset)))
    return saved


class _Whole:
    """A tensor while parts of it arrive; where the first is all of it, that is what is kept."""

    def __init__(self, first: Tensor, shape: tuple[int, ...]) -> None:
        is_all = tuple(first.shape) == shape
        self.values = first if is_all else first.new_zeros(shape)
        self._seen = None if is_all else torch.zeros(shape, dtype=torch.bool)  # None: all
        self._contradictions: list[str] = []

    def fill(
        self, rank: str, local: Tensor, shape: tuple[int, ...], offset: tuple[int, ...]
    ) -> None:
        if shape != tuple(self.values.shape):
            self._contradictions.append(
                f"shape {tuple(shape)} of {rank} must equal {tuple(self.values.shape)}"
            )
            return
        if local is self.values:
            return
        box = tuple(slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))
        here, seen = self.values[box], None if self._seen is None else self._seen[box]
        if (seen is None or seen.any()) and not torch.equal(here, local):
            differs = (here != local) & ~(here.isnan() & local.isnan())
            differs = differs if seen is None else differs & seen
            if differs.any():
                far = (here - local)[differs].abs().max()
                self._contradictions.append(
                    f"{rank} differs from a rank before it that holds the same, by up to {far:g}"
                )
            local = here if seen is None else torch.where(seen, here, local)
        if seen is not None:
            here.copy_(local)
            seen.fill_(True)

    def flaws(self) -> list[str]:
        if self._seen is None or not (missing := int((~self._seen).sum())):
            return self._contradictions
        return [*self._contradictions, f"{missing} of {self._seen.numel()} values are on no rank"]
