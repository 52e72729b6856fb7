"""Saving each rank's experts to safetensors files that Hugging Face's tools read."""

from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from hp_checkpoint import Part, Source
from hp_checkpoint.collective import on_rank_zero
from hp_checkpoint.files import created, write
from hp_checkpoint.manifest import DIGEST, MANIFEST, NAME_OF, Manifest
from hp_checkpoint.safetensors import INDEX, index_of
from hp_checkpoint.save import Written, finish, write_file
from hp_expert.checkpoint import ExpertNames
from hp_expert.checkpoint.parts import StackedPart, find_experts, to_hf
from hp_platform import agree
from hp_platform.failures.messages import agreeing


def save_experts(
    module: nn.Module,
    directory: str | Path,
    *,
    others: Mapping[str, Tensor] | None = None,
    names: ExpertNames | None = None,
    group: ProcessGroup | None,
    writes: bool = True,
) -> None:
    """Write a checkpoint, each rank its experts: a file for each layer and rank, and the index.

    Experts are gathered only where other dims are sharded as well, and then those of one layer and
    rank at a time. A manifest with hashes of all tensors is written beside the files, and the files
    are read back and compared with it. The index is written last: without it, the files are not a
    checkpoint.

    Args:
        module: Module that contains the experts.
        directory: Directory of the checkpoint; made if it is missing; must have no safetensors
            files.
        others: Whole tensors that are not experts, by their names in the module; those of rank 0
            are written. Tied tensors are written under each name.
        names: Names that the checkpoint uses, not stacked; None: `ExpertNames()`.
        group: CPU group of the ranks that call together, all of which raise if one does; None: this
            rank is alone.
        writes: Whether this rank writes its experts. Of ranks that have the same experts, one must;
            on a mesh this is found from the placements.

    Raises:
        ValueError: If there are safetensors files, or parts of experts are unknown.
        hp_platform.PeerError: If something failed on another rank.
    """
    names, directory = names or ExpertNames(), Path(directory).resolve()
    is_first = group is None or group.rank() == 0
    with agreeing(group=group, where="experts are saved"):
        _require_fit(module, directory, names, is_first=is_first)
    head = on_rank_zero(lambda: uuid4().hex, of=str, group=group), 0
    error: Exception | None = None
    written: list[Written] = []
    for layer, (path, experts, stacked) in enumerate(find_experts(module)):
        own = {
            f"{path}.{name}" if path else name: experts.get_parameter(name).detach()
            for name in stacked
        }
        first = _first_expert(experts, stacked)
        try:
            mine = _gathered(to_hf(own, names, first_expert=first))
            if writes and error is None and _is_first_of_replicas(experts, stacked):
                file = directory / f"experts-{layer:05d}-{first:05d}.safetensors"
                written.append(_write(mine, file, head))
        except ValueError as raised:  # about the sharding: the same on every rank
            error = error or raised
    try:
        if is_first and error is None and others:
            renamed = {names.file_key(key): tensor for key, tensor in others.items()}
            written.append(_write(renamed, directory / "model-others.safetensors", head))
    except ValueError as raised:
        error = raised
    agree(error, group=group, where="the manifest of saved experts is written")
    manifest = finish(directory, written, head=head, group=group)
    with agreeing(group=group, where="saved experts are used"):
        if is_first:
            _write_index(directory, manifest)


def _require_fit(module: nn.Module, directory: Path, names: ExpertNames, *, is_first: bool) -> None:
    """Raise ValueError if experts cannot be saved; the first rank makes the directory."""
    if names.is_stacked:
        raise ValueError("names must not be stacked: ranks cannot write one tensor together")
    list(find_experts(module))
    if is_first:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.glob("*.safetensors")):
            raise ValueError(f"directory ({directory}) must have no safetensors files")
        for name in (INDEX, MANIFEST, DIGEST):
            (directory / name).unlink(missing_ok=True)


def _first_expert(experts: nn.Module, stacked: list[str]) -> int:
    parameter = experts.get_parameter(stacked[0])
    if isinstance(parameter, DTensor):
        return StackedPart.of(parameter).offset[0]
    return int(getattr(experts, "first_expert", 0))


def _is_first_of_replicas(experts: nn.Module, stacked: list[str]) -> bool:
    """Tell whether no rank before this one, on the same mesh, has the same experts."""
    weight = next(p for p in map(experts.get_parameter, stacked) if p.ndim == 3)
    if not isinstance(weight, DTensor):
        return True
    coordinate = weight.device_mesh.get_coordinate() or ()
    others = zip(coordinate, weight.placements, strict=True)
    return not any(place for place, placement in others if not placement.is_shard(0))


def _gathered(single: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return whole projections; all ranks that share them must call."""
    return {k: t.full_tensor() if isinstance(t, DTensor) else t for k, t in single.items()}


def _write(tensors: Mapping[str, Tensor], path: Path, head: tuple[str, int]) -> Written:
    """Write whole tensors to a file."""
    chosen = []
    for key, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            raise ValueError(f"{key} must be a whole tensor, such as that of full_tensor()")  # noqa: TRY004  # of the call, not of a type
        if tensor.dtype not in NAME_OF:
            raise ValueError(f"dtype of {key} ({tensor.dtype}) must be one of {[*NAME_OF]}")
        part = Part.of(tensor)
        chosen.append((key, part.box, Source.of(part)))
    return write_file(path, chosen, head=head)


def _write_index(directory: Path, manifest: Manifest) -> None:
    """Write the index: the file of each tensor."""
    files = {
        entry.tensor: manifest.files[entry.chunk.file].name
        for of_file in manifest.entries
        for entry in of_file
    }
    num_bytes = sum(entry.nbytes for of_file in manifest.entries for entry in of_file)
    with created(directory / INDEX) as descriptor:
        write(descriptor, memoryview(index_of(files, num_bytes)))
