"""Writing each rank's experts to safetensors files, as Hugging Face's tools read them."""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from hp_expert.checkpoint.convert import to_hf
from hp_expert.checkpoint.load import agree_or_raise, safetensors
from hp_expert.checkpoint.names import ExpertNames
from hp_expert.checkpoint.parts import StackedPart, find_experts

INDEX = "model.safetensors.index.json"


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

    Experts are not gathered; only where other dims are sharded as well, those of one layer and rank
    are. The index is written last: without it, the files are no checkpoint.

    Args:
        module: With the experts.
        directory: Made if it is missing; must have no safetensors files.
        others: Whole tensors that are no experts, by their names in the module; those of rank 0
            are written. Tied ones are written under each name.
        names: Of the checkpoint; not stacked ones.
        group: CPU group of the ranks that call together, all of which raise if one does; None: this
            rank is alone.
        writes: Whether this rank writes its experts. Of ranks that have the same, one should; those
            of one mesh know that themselves.

    Raises:
        ValueError: If there are safetensors files, or the experts cannot be told apart.
        hp_platform.PeerError: If something failed on another rank.
        ImportError: If safetensors is not installed.
    """
    names, directory = names or ExpertNames(), Path(directory)
    is_first = group is None or group.rank() == 0
    unfit = _unfit(module, directory, names, is_first=is_first)
    agree_or_raise(unfit, group, "experts are saved")
    error: Exception | None = None
    for layer, (path, experts, stacked) in enumerate(find_experts(module)):
        own = {
            f"{path}.{name}" if path else name: experts.get_parameter(name).detach()
            for name in stacked
        }
        first = _first_expert(experts, stacked)
        try:
            mine = _gathered(to_hf(own, names, first_expert=first))
        except ValueError as raised:  # of the sharding: the same on every rank
            error = error or raised
            continue
        if writes and error is None and _is_first_of_replicas(experts, stacked):
            error = _write(mine, directory / f"experts-{layer:05d}-{first:05d}.safetensors")
    if is_first and error is None:
        renamed = {names.file_key(key): tensor for key, tensor in (others or {}).items()}
        error = _write(renamed, directory / "model-others.safetensors")
    agree_or_raise(error, group, "the index of saved experts is written")
    agree_or_raise(_write_index(directory) if is_first else None, group, "saved experts are used")


def _unfit(
    module: nn.Module, directory: Path, names: ExpertNames, *, is_first: bool
) -> Exception | None:
    """Return why nothing can be saved, if so; the first rank makes the directory."""
    try:
        safetensors()
        if names.is_stacked:
            return ValueError("names must not be stacked: ranks cannot write one tensor together")
        list(find_experts(module))
        if is_first:
            directory.mkdir(parents=True, exist_ok=True)
            if any(directory.glob("*.safetensors")):
                return ValueError(f"directory ({directory}) must have no safetensors files")
    except Exception as error:  # noqa: BLE001 - told to all ranks, then raised
        return error
    return None


def _first_expert(experts: nn.Module, stacked: list[str]) -> int:
    parameter = experts.get_parameter(stacked[0])
    if isinstance(parameter, DTensor):
        return StackedPart.of(parameter).offset[0]
    return int(getattr(experts, "first_expert", 0))


def _is_first_of_replicas(experts: nn.Module, stacked: list[str]) -> bool:
    """Whether no rank before this one, on the same mesh, has the same experts."""
    weight = next(p for p in map(experts.get_parameter, stacked) if p.ndim == 3)
    if not isinstance(weight, DTensor):
        return True
    coordinate = weight.device_mesh.get_coordinate() or ()
    others = zip(coordinate, weight.placements, strict=True)
    return not any(place for place, placement in others if not placement.is_shard(0))


def _gathered(single: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return whole projections; all ranks that share them must call."""
    return {k: t.full_tensor() if isinstance(t, DTensor) else t for k, t in single.items()}


def _write(tensors: Mapping[str, Tensor], path: Path) -> Exception | None:
    """Write a file, if there is anything to write; return what went wrong."""
    save_file: Any = import_module("safetensors.torch").save_file
    try:
        if tensors:
            save_file(_apart(tensors), path, metadata={"format": "pt"})
    except Exception as error:  # noqa: BLE001 - told to all ranks, then raised
        return error
    return None


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give each tensor memory of its own, which tied ones (embedding and head) do not have."""
    seen: set[int] = set()  # where tensors begin: single experts are views of one memory as well
    found: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            raise ValueError(f"{key} must be a whole tensor, such as that of full_tensor()")  # noqa: TRY004  # of the call, not of a type
        is_tied = tensor.data_ptr() in seen
        seen.add(tensor.data_ptr())
        found[key] = tensor.detach().clone() if is_tied else tensor.detach().contiguous()
    return found


def _write_index(directory: Path) -> Exception | None:
    """Write which file has which tensor, from the headers of the files."""
    safe_open: Any = safetensors().safe_open
    file_of: dict[str, str] = {}
    num_bytes = 0
    try:
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                file_of |= dict.fromkeys(file.keys(), path.name)
                num_bytes += path.stat().st_size
        index = {"metadata": {"total_size": num_bytes}, "weight_map": file_of}
        (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    except Exception as error:  # noqa: BLE001 - told to all ranks, then raised
        return error
    return None
