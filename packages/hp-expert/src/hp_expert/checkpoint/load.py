"""Loading this rank's experts, and no other tensors, from safetensors files.

Shape symbols: E experts, R rows (out), C columns (in).
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hp_checkpoint import Box, Checkpoint
from hp_checkpoint.manifest import MANIFEST
from hp_checkpoint.safetensors import FileTensor, opened_tensors
from hp_expert.checkpoint import BIASES, PROJECTIONS, ExpertNames
from hp_expert.checkpoint.parts import StackedPart, keys_of, pieces, stacked_parts
from hp_platform.failures.messages import agreeing

_DTYPES = ("F64", "F32", "BF16", "F16")
_SHOWN = 3


_Read = tuple[Tensor, str, Box]
"""Destination of a box of a tensor of a file, name of the tensor, and the box."""


def load_experts(
    target: nn.Module | Mapping[str, StackedPart],
    files: str | Path | Iterable[str | Path],
    *,
    names: ExpertNames | None = None,
    group: ProcessGroup | None,
) -> None:
    """Load the experts of this rank from safetensors files, in place.

    Reads the slices of this rank into the storage of its parameters, one projection of one expert
    at a time. Values are cast to the dtype of the parameter. A checkpoint may have the projections
    of experts one by one or stacked (`gate_up_proj`).

    Args:
        target: A module with experts, sharded in any way; or parts by name, for tensors whose
            place in the whole only the caller knows.
        files: A directory of safetensors files, or the files.
        names: Names that the checkpoint uses, see `expert_names`; None: `ExpertNames()`.
        group: CPU group of the ranks that call together, all of which raise if one does; None: this
            rank is alone.

    Raises:
        ValueError: On every rank and before any parameter is changed: if an expert is missing,
            unexpected or of another shape or dtype, or, in a directory with a manifest of hashes,
            differs from its hash; the message names it.
        hp_platform.PeerError: If that, or reading, failed on another rank.
    """
    names = names or ExpertNames()
    with ExitStack() as stack:
        with agreeing(group=group, where="experts are loaded"):
            parts = stacked_parts(target) if isinstance(target, nn.Module) else dict(target)
            found = stack.enter_context(opened_tensors(_paths(files)))
            reads = _plan(parts, found, names)
            if isinstance(files, str | Path) and os.path.lexists(Path(files, MANIFEST)):
                Checkpoint.open(Path(files).resolve()).verify({key for _, key, _ in reads})
        with agreeing(group=group, where="loaded experts are used"), torch.no_grad():
            for destination, key, box in reads:
                destination.copy_(found[key].read(box).view(destination.shape))


def _paths(files: str | Path | Iterable[str | Path]) -> list[Path]:
    if not isinstance(files, str | Path):
        return [Path(file) for file in files]
    found = sorted(Path(files).glob("*.safetensors"))
    if not found:
        raise ValueError(f"files ({files}) must be a directory with *.safetensors files")
    return found


def _plan(
    parts: Mapping[str, StackedPart], found: Mapping[str, FileTensor], names: ExpertNames
) -> list[_Read]:
    """Check all tensors and return the boxes that this rank reads."""
    reads: list[_Read] = []
    wanted: dict[str, tuple[int, ...]] = {}
    for name, part in parts.items():
        if part.local.is_meta:
            raise ValueError(f"{name} must have memory (model.to_empty) before it is loaded")
        path, _, stacked = name.rpartition(".")
        if stacked not in PROJECTIONS:
            raise ValueError(f"name of a part ({name}) must end in one of {list(PROJECTIONS)}")
        bias = stacked in BIASES
        key = names.stacked_key(path, PROJECTIONS[stacked][0], bias=bias)
        if names.is_stacked or key in found:
            wanted[key] = _whole_shape(stacked, part)
            reads += _stacked_reads(key, stacked, part)
        else:
            wanted |= keys_of(name, part, names)
            reads += [
                (p.destination, names.expert_key(path, p.expert, p.projection, bias=bias), p.box)
                for p in pieces(stacked, part)
            ]
    _require_wanted(wanted, found)
    _require_no_others(parts, wanted, found, names)
    return reads


def _whole_shape(stacked: str, part: StackedPart) -> tuple[int, ...]:
    """Return the shape of the stacked tensor of a file from which a part is read."""
    E, R, *columns = part.shape
    is_half = PROJECTIONS[stacked] in (("gate",), ("up",))
    return (E, 2 * R if is_half else R, *columns)


def _stacked_reads(key: str, stacked: str, part: StackedPart) -> Iterator[_Read]:
    """Yield the reads from a tensor of all experts, gate rows before up rows."""
    for piece in pieces(stacked, part):
        (first_row, *columns), sizes = piece.box
        shift = piece.shape[0] if piece.projection == "up" else 0
        box = Box((piece.expert, first_row + shift, *columns), (1, *sizes))
        yield piece.destination, key, box


def _require_wanted(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, FileTensor]) -> None:
    missing = [key for key in wanted if key not in found]
    if missing:
        raise ValueError(f"files must contain {_listed(missing)}")
    for key, shape in wanted.items():
        if found[key].shape != shape:
            raise ValueError(f"shape of {key} {found[key].shape} must equal {shape}")
        if found[key].dtype not in _DTYPES:
            raise ValueError(f"dtype of {key} ({found[key].dtype}) must be one of {_DTYPES}")


def _require_no_others(
    parts: Mapping[str, StackedPart],
    wanted: Mapping[str, tuple[int, ...]],
    found: Mapping[str, FileTensor],
    names: ExpertNames,
) -> None:
    """Raise ValueError for experts, and tensors of experts, that the modules do not have."""
    paths = {names.prefix(name.rpartition(".")[0]) for name in parts}
    of_expert = re.compile(f"({'|'.join(map(re.escape, sorted(paths)))})[0-9]+\\.")
    others = [key for key in found if key not in wanted and of_expert.match(key)]
    if others:
        raise ValueError(
            f"files must not contain {_listed(others)}, which the module does not have"
        )


def _listed(keys: list[str]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return f"{', '.join(keys[:_SHOWN])}{more}"
