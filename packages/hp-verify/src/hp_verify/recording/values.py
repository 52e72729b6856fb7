"""Values of tensors: every rank writes the parts that it holds, a reader puts them together.

The reader needs neither the groups of a run nor its number of ranks, so a run of any layout can be
compared with a run of any other after both ended. Values lie end to end in a file, beside an index;
neither who writes them nor who reads them has a second copy in memory.
"""

import math
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from hp_base.atomic_write import replace_file
from hp_base.dtypes import dtype_name
from hp_verify.recording.events import TERMS, Box
from hp_verify.recording.slices import Flat, index_of, placed, sizes_of

_ALIGNED = 64


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A box of a tensor that is spread over ranks.

    Attributes:
        values: The values here.
        shape: Shape of the whole tensor.
        offset: First index of the box in the whole, one number for each dim.
        rank: Rank that has it.
        adds: Whether ranks may have terms of a sum.
        call: Call of a module, or backward, that it is of.
    """

    values: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    rank: int = 0
    adds: bool = False
    call: int = 0

    def __post_init__(self) -> None:
        """Refuse a box that is not inside the whole."""
        sizes = tuple(self.values.shape)
        fits = len(sizes) == len(self.shape) == len(self.offset) and all(
            o >= 0 and o + n <= whole
            for o, n, whole in zip(self.offset, sizes, self.shape, strict=True)
        )
        if not fits:
            raise ValueError(
                f"offset {self.offset} + local {sizes} must be inside shape {self.shape}"
            )

    @property
    def box(self) -> Box:
        """Return the first and last + 1 index of each dim."""
        return tuple((o, o + n) for o, n in zip(self.offset, self.values.shape, strict=True))


def offset_of(box: Box) -> tuple[int, ...]:
    """Return the first index of each dim of a box."""
    return tuple(begin for begin, _ in box)


def parts_of(value: Tensor | Flat | Part) -> list[Part]:
    """Return the parts of a tensor that this rank holds.

    Args:
        value: A part; a plain tensor, which is whole; values of a flat one; or a DTensor. All ranks
            of the mesh of a DTensor of partial sums must come here.
    """
    if isinstance(value, Part):
        return [value]
    local, slices, shape = placed(value)
    return [Part(each.of(local), shape, offset_of(each.box)) for each in slices]


@dataclass(slots=True, eq=False)
class Whole:
    """A tensor put together from parts.

    Attributes:
        values: All of it; zero where no rank has it.
        parts: Parts of it.
        num_missing: Values that are on no rank.
        is_sum: Whether parts were added up because they were not the same.
        contradictions: Sentences about ranks that hold other values of the same part.
    """

    values: Tensor
    parts: list[Part]
    num_missing: int = 0
    is_sum: bool = False
    contradictions: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Tell whether every value is on a rank."""
        return not self.num_missing

    def flaws(self) -> list[str]:
        """Say what is wrong with the parts."""
        missing = f"{self.num_missing} of {self.values.numel()} values are on no rank"
        return [*self.contradictions, *[missing] * (self.num_missing > 0)]


def whole_of(parts: Sequence[Part]) -> Whole:
    """Put parts of one tensor together; of ranks that should have the same, the first counts.

    Args:
        parts: Parts of one tensor, one or more.
    """
    first, start = parts[0], parts[0].values.detach()
    is_all = tuple(start.shape) == first.shape
    result = Whole(start if is_all else start.new_zeros(first.shape), list(parts))
    if is_all and len(parts) == 1:
        return result
    seen = torch.full(first.shape, is_all)
    for part in parts[1:] if is_all else parts:
        if part.shape != first.shape:
            result.contradictions.append(
                f"shape {part.shape} of rank-{part.rank:05d} must equal {first.shape}"
            )
            continue
        index, values = index_of(part.box), part.values.detach()
        here, known = result.values[index], seen[index]
        is_known = bool(known.all())
        if is_known and part.adds and _apart(values, here) > TERMS:
            result.is_sum, result.values = True, result.values.clone()
            result.values[index] = here + values
            continue
        if is_known or bool(known.any()):
            result.contradictions += _contradictions(part, here, known)
        if not is_known:
            here.copy_(torch.where(known, here, values))
            known.fill_(True)
    result.num_missing = int((~seen).sum())
    return result


def widened(tensor: Tensor) -> Tensor:
    """Cast a tensor to float64, a complex one to complex128."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _contradictions(part: Part, here: Tensor, known: Tensor) -> list[str]:
    """Compare a part with what ranks before it have of it, bit by bit."""
    if torch.equal(here, part.values):
        return []
    differs = (here != part.values) & ~(here.isnan() & part.values.isnan()) & known
    if not bool(differs.any()):
        return []
    far = (widened(here) - widened(part.values))[differs].abs().max()
    before = "differs from a rank before it that holds the same"
    return [f"rank-{part.rank:05d} {before}, by up to {far:g}"]


def _apart(a: Tensor, b: Tensor) -> float:
    a, b = widened(a), widened(b)
    return float((a - b).norm() / torch.maximum(a.norm(), b.norm()).clamp(min=1e-300))


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    """A part in a file.

    Attributes:
        kind: Kind of the tensor.
        name: Name of the tensor among those of its kind.
        dtype: Dtype of the values, without ``torch.``.
        shape: Shape of the whole.
        box: Place of the part in the whole tensor.
        at: First byte of the values.
    """

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    at: int


def write_parts(path: Path, parts: Iterable[tuple[str, str, Part]]) -> None:
    """Write parts of tensors: values into a file, then an index of them beside it.

    Args:
        path: The index, whose name ends in ``.json``.
        parts: Kind of a tensor, its name, and a part of it.
    """
    stored: list[_Stored] = []
    with path.with_suffix(".bin").open("wb") as file:
        at = 0
        for kind, name, part in parts:
            values = part.values.detach().contiguous().reshape(-1)
            padding = -at % _ALIGNED
            file.write(bytes(padding))
            at += padding
            stored.append(_Stored(kind, name, dtype_name(values.dtype), part.shape, part.box, at))
            at += file.write(values.cpu().view(torch.uint8).numpy().data)
    replace_file(path, msgspec.json.encode(stored))


def read_parts(path: Path, *, rank: int = 0) -> Iterator[tuple[str, str, Part]]:
    """Yield what `write_parts` has written; values are read when they are looked at.

    Args:
        path: The index.
        rank: Rank that has written it.
    """
    stored = msgspec.json.decode(path.read_bytes(), type=list[_Stored])
    with path.with_suffix(".bin").open("rb") as file:
        size = file.seek(0, 2)
        data = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else bytearray()
    for each in stored:
        sizes = sizes_of(each.box)
        dtype: torch.dtype = getattr(torch, each.dtype)
        count = math.prod(sizes)
        flat = torch.frombuffer(data, dtype=dtype, count=count, offset=each.at) if count else None
        values = torch.empty(sizes, dtype=dtype) if flat is None else flat.view(sizes)
        yield each.kind, each.name, Part(values, each.shape, offset_of(each.box), rank)


class StepRecorder(Protocol):
    """Takes down one rank's part of every step: values (`ValueRecorder`) or digests."""

    def add(
        self,
        quantity: str,
        tensors: Mapping[str, Tensor | Part],
        *,
        in_every_step: bool = False,
    ) -> None:
        """Note down tensors of this step as they are now.

        Args:
            quantity: Kind of what is compared, for example "gradient". The order of quantities and
                of names is the one in which a difference is looked for first.
            tensors: Tensors by name in the whole model. Ranks may add different names, and several
                parts of the same one.
            in_every_step: Whether to keep them in steps whose tensors are not wanted, too.
        """

    def add_scalar(self, quantity: str, value: float) -> None:
        """Note down a number that is the same on all ranks; kept in every step."""


class ValueRecorder(StepRecorder):
    """Writes down one rank's part of every step, as values.

    Args:
        folder: The same for all ranks of a run, on storage that the reader sees.
        rank: Rank of this process.
        quantities: Quantities to keep; others are dropped. None: all.
        tensor_steps: Steps, counted from 1, whose tensors of more than one value are wanted; None:
            all.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        quantities: frozenset[str] | None = None,
        tensor_steps: frozenset[int] | None = None,
    ) -> None:
        self._folder, self._rank = folder, rank
        self._quantities, self._tensor_steps = quantities, tensor_steps
        self._step = 1
        self._parts: list[tuple[str, str, Part]] = []

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
        """See `StepRecorder`; tensors are copied."""
        if self._is_chosen(quantity) if in_every_step else self.wants(quantity):
            for name, tensor in tensors.items():
                for part in parts_of(tensor):
                    copied = part.values.detach().to("cpu", copy=True)
                    self._parts.append((quantity, name, Part(copied, part.shape, part.offset)))

    def add_scalar(self, quantity: str, value: float) -> None:
        """See `StepRecorder`."""
        if self._is_chosen(quantity):
            number = torch.tensor(value, dtype=torch.float64)
            self._parts.append((quantity, "", Part(number, (), ())))

    def end_step(self) -> None:
        """Write what was noted down; the next step begins."""
        folder = self._folder / f"step-{self._step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        write_parts(folder / f"rank-{self._rank:05d}.json", self._parts)
        self._parts = []
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


def read_steps(folder: Path) -> Iterator[RecordedStep]:
    """Yield the steps of a recording, one at a time.

    Args:
        folder: Folder of the recorders.

    Raises:
        FileNotFoundError: If nothing was recorded there.
    """
    folders = sorted(folder.glob("step-*"))
    if not folders:
        raise FileNotFoundError(f"{folder} must hold a recording")
    for each in folders:
        parts: dict[str, dict[str, list[Part]]] = {}
        files = sorted(each.glob("rank-*.json"))
        ranks = (read_parts(file, rank=int(file.stem.removeprefix("rank-"))) for file in files)
        for quantity, name, part in chain.from_iterable(ranks):
            parts.setdefault(quantity, {}).setdefault(name, []).append(part)
        wholes = {
            quantity: {name: whole_of(some) for name, some in names.items()}
            for quantity, names in parts.items()
        }
        flaws = [
            f"{quantity} {name}: {flaw}"
            for quantity, names in wholes.items()
            for name, whole in names.items()
            for flaw in whole.flaws()
        ]
        tensors = {q: {name: w.values for name, w in some.items()} for q, some in wholes.items()}
        yield RecordedStep(int(each.name.removeprefix("step-")), tensors, tuple(flaws))
