"""Tensors in the files of a model, and our tensors that make each of them.

Names and shapes, and conversions of values in both directions; nothing is read here.

Shape symbols: E experts, D model width, F hidden width of an expert.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hp_checkpoint import Box
from hp_trainer.config import ModelConfig
from hp_trainer.model.parameters import Declared
from hp_transformers.families.family import Family, Stacking

Shape = tuple[int, ...]

Arrangement = Literal["same", "transposed", "interleaved", "concatenated"]
"""Order of the values of a stored tensor: as in its part; each expert transposed; the columns of
both parts, transposed, in turns; the rows of the second part after those of the first."""

_PROJECTION = {"1": 0, "3": 1, "2": 2}


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a file.

    Attributes:
        name: Name in the files.
        shape: Shape of the whole tensor.
        parts: Names of our tensors in it: one, or gate and up.
        expert: Index of the expert in a stacked part; None: it has all of the part.
        arrangement: Order of its values.
        is_copy: Whether it repeats another tensor: it is written, and may be missing to read.
    """

    name: str
    shape: Shape
    parts: tuple[str, ...]
    expert: int | None = None
    arrangement: Arrangement = "same"
    is_copy: bool = False


def stored_tensors(
    tensors: Mapping[str, Declared],
    model: ModelConfig,
    family: Family,
    *,
    stacking: Stacking | None = None,
) -> list[Stored]:
    """List all tensors of a model's files, in the order of `tensors`.

    Args:
        tensors: All our parameters and buffers, by global name.
        model: Configuration of their model.
        family: Family that gives the names.
        stacking: Form of experts; None: the published form of the family.
    """
    stacking = stacking or family.stacking
    found: list[Stored] = []
    for name, tensor in tensors.items():
        theirs = _renamed(tensor.published, family)
        if not tensor.spec.is_expert:
            found.append(Stored(theirs, tensor.shape, (name,)))
            continue
        path = theirs.rpartition(".")[0]
        if stacking == "none":
            found += _single(path, name, tensor.shape, family)
        else:
            found += _stacked(path, name, tensor.shape, is_interleaved=stacking == "interleaved")
    return [*found, *_copies(tensors, model)]


def stacking_of(names: Collection[str], family: Family) -> Stacking:
    """Return the form of experts in files whose tensors have these names."""
    if family.stacking == "none" and any(n.endswith(".experts.gate_up_proj") for n in names):
        return "concatenated"
    return family.stacking


def theirs_of(stored: Stored, part: int, box: Box) -> Box:
    """Return the box of a stored tensor that holds a box of one of its parts.

    Args:
        stored: Stored tensor; no single expert of a stack, whose box has a dimension less.
        part: Index of the part in `stored.parts`.
        box: Box of the part.
    """
    offsets, sizes = box
    if stored.arrangement == "same":
        return box
    if stored.arrangement == "concatenated":
        return Box((offsets[0], offsets[1] + part * (stored.shape[1] // 2), *offsets[2:]), sizes)
    (e, f, *d), (ne, nf, *nd) = offsets, sizes
    if stored.arrangement == "transposed":
        return Box((e, *d, f), (ne, *nd, nf))
    return Box((e, *d, 2 * f), (ne, *nd, 2 * nf))


def to_theirs(stored: Stored, values: Sequence[Tensor]) -> Tensor:
    """Convert the values of the same box of each part to values of a stored tensor."""
    turned = [v.mT if v.ndim == 3 else v for v in values]
    if stored.arrangement == "interleaved":
        return torch.stack(turned, dim=-1).flatten(-2)
    return turned[0] if stored.arrangement == "transposed" else values[0]


def to_ours(stored: Stored, part: int, values: Tensor) -> Tensor:
    """Convert values of a stored tensor, in the box of `theirs_of`, to values of one part."""
    if stored.arrangement == "interleaved":
        values = values.unflatten(-1, (-1, 2))[..., part]
    if stored.arrangement in ("interleaved", "transposed") and values.ndim == 3:
        return values.mT
    return values


def _renamed(published: str, family: Family) -> str:
    """Return the name of a tensor in files of a family."""
    for usual, theirs in family.renamed.items():
        published = f"{published}.".replace(f".{usual}.", f".{theirs}.")[:-1]
    return published


def _single(path: str, name: str, shape: Shape, family: Family) -> Iterator[Stored]:
    """Yield one stored tensor per expert for one of our stacks."""
    projection = family.projections[_PROJECTION[name[-1]]]
    ending = "weight" if name[-2] == "w" else "bias"
    for expert in range(shape[0]):
        yield Stored(f"{path}.{expert}.{projection}.{ending}", shape[1:], (name,), expert)


def _stacked(path: str, name: str, shape: Shape, *, is_interleaved: bool) -> Iterator[Stored]:
    """Yield the stored tensor for one of our stacks; w1 yields that of gate and up, and w3 none."""
    kind, number = name[-2:-1], name[-1:]
    ending = "" if kind == "w" else "_bias"
    E, F, *D = shape
    if number == "2":
        turned = is_interleaved and kind == "w"
        theirs = (E, *D, F) if turned else shape
        arrangement: Arrangement = "transposed" if turned else "same"
        yield Stored(f"{path}.down_proj{ending}", theirs, (name,), None, arrangement)
    elif number == "1":
        both = (name, f"{name[:-1]}3")
        theirs = (E, *D, 2 * F) if is_interleaved else (E, 2 * F, *D)
        arrangement = "interleaved" if is_interleaved else "concatenated"
        yield Stored(f"{path}.gate_up_proj{ending}", theirs, both, None, arrangement)


def _copies(tensors: Mapping[str, Declared], model: ModelConfig) -> Iterator[Stored]:
    """Yield the copies of embedding and output matrix in each published module of prediction."""
    head = "output.weight" if "output.weight" in tensors else "embedding.weight"
    for depth in range(model.num_mtp_modules):
        path = f"model.layers.{model.num_layers + depth}"
        for name, part in (
            ("embed_tokens", "embedding.weight"),
            ("shared_head.head", head),
        ):
            if part in tensors:
                yield Stored(f"{path}.{name}.weight", tensors[part].shape, (part,), is_copy=True)
