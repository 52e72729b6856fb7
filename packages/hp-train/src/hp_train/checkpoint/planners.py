"""`torch.distributed.checkpoint`'s planners, made strict.

torch's own cast a saved fp32 tensor into a bf16 one, take any of several ranks' differing ideas of
a tensor, leave a tensor on the meta device as it is, and ignore what a checkpoint has beyond the
asked-for. All of these are refused here, by name, before a byte is written or a tensor touched.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate, Shard

from hp_train.checkpoint.manifest import DtypeName, Manifest, name_error
from hp_train.errors import CheckpointError

DTYPES: dict[DtypeName, torch.dtype] = {
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""Safetensors' name of every dtype that can be saved, and torch's."""

NAME_OF = {dtype: name for name, dtype in DTYPES.items()}


class StrictSavePlanner(DefaultSavePlanner):
    """Every tensor once: of several holders, the one with the least to write so far."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """What this rank holds."""
        _require_supported(self.state_dict)
        plan = super().create_local_plan()
        for item in plan.items:
            local: Tensor = self.lookup_object(item.index)
            if item.tensor_data is not None and local.shape != item.tensor_data.chunk.sizes:
                raise _wrong_part(item.index.fqn, local)
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Who writes what, on the coordinator, if the ranks agree what the tensors are."""
        seen: dict[str, tuple[int, str]] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                name, idea = item.index.fqn, _described(item)
                first, theirs = seen.setdefault(name, (rank, idea))
                if idea != theirs:
                    raise CheckpointError(
                        f"tensor {name}: {idea} of rank {rank} must equal {theirs} of rank {first}"
                    )
        return super().create_global_plan(all_plans)


class CopiesSavePlanner(StrictSavePlanner):
    """Plans by the tensors it is given and writes copies that were made of them.

    Args:
        copies: Of what this rank holds of each tensor, by name.
    """

    def __init__(self, copies: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._copies = copies

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The copy of a tensor, whatever has become of the tensor itself."""
        return self._copies[index.fqn]


class StrictLoadPlanner(DefaultLoadPlanner):
    """The names of all ranks together are those of the checkpoint; dtypes and shapes are equal."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the tensors; the base class would replace those on the meta device."""
        _require_supported(state_dict)
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        """What this rank needs of which saved chunk."""
        saved = {} if self.metadata is None else self.metadata.state_dict_metadata
        if missing := self.state_dict.keys() - saved.keys():
            raise CheckpointError(f"the checkpoint lacks {_listed(missing)}")
        for name, tensor in self.state_dict.items():
            entry = saved[name]
            if isinstance(entry, TensorStorageMetadata):
                _require_equal(name, tensor, entry)
        plan = super().create_local_plan()
        self._require_filled(plan)
        return dataclasses.replace(plan, planner_data=sorted(self.state_dict))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Check, on the coordinator, that some rank wants each saved tensor."""
        saved = set() if self.metadata is None else self.metadata.state_dict_metadata.keys()
        wanted = {name for plan in global_plan for name in plan.planner_data}
        if unexpected := saved - wanted:
            raise CheckpointError(f"the checkpoint has {_listed(unexpected)}, which no rank wants")
        return super().create_global_plan(global_plan)

    def _require_filled(self, plan: LoadPlan) -> None:
        """Check that what will be copied is exactly what the local tensors hold."""
        elements: Counter[str] = Counter()
        for item in plan.items:
            name, local = item.dest_index.fqn, self.lookup_tensor(item.dest_index)
            elements[name] += math.prod(item.lengths)
            ends = [o + n for o, n in zip(item.dest_offsets, item.lengths, strict=True)]
            if len(ends) != local.ndim or any(
                e > n for e, n in zip(ends, local.shape, strict=True)
            ):
                raise _wrong_part(name, local)
        for name, tensor in self.state_dict.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.numel() != elements[name]:
                raise _wrong_part(name, local)


def metadata_of(manifest: Manifest) -> Metadata:
    """The manifest's tensors, as the planners want them."""
    return Metadata(
        {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=DTYPES[tensor.dtype]),
                size=torch.Size(tensor.shape),
                chunks=[
                    ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                    for chunk in tensor.chunks
                ],
            )
            for name, tensor in manifest.tensors.items()
        }
    )


def _require_supported(tensors: Mapping[str, Any]) -> None:
    for name, tensor in tensors.items():
        if error := name_error(name) or _tensor_error(tensor):
            raise CheckpointError(f"tensor {name}: {error}")


def _tensor_error(tensor: object) -> str | None:
    if not isinstance(tensor, Tensor):
        return f"type ({type(tensor).__name__}) must be Tensor"
    local = tensor
    if isinstance(tensor, DTensor):
        if any(type(placement) not in (Shard, Replicate) for placement in tensor.placements):
            return f"placements ({tensor.placements}) must be Shard or Replicate"
        local = tensor.to_local()
    if local.layout != torch.strided or local.is_quantized or local.device.type == "meta":
        return f"layout ({local.layout}) on {local.device} must be strided memory"
    if local.dtype not in NAME_OF:
        return f"dtype ({local.dtype}) must be one of {', '.join(map(str, NAME_OF))}"
    return None


def _described(item: WriteItem) -> str:
    """What a rank takes a tensor for, in words."""
    data = item.tensor_data
    if data is None:
        return "no tensor"
    kind = "DTensor" if item.type == WriteItemType.SHARD else "Tensor"
    return f"{kind} {list(data.size)} {data.properties.dtype}"


def _wrong_part(name: str, local: Tensor) -> CheckpointError:
    return CheckpointError(
        f"tensor {name}: shape of the local part ({list(local.shape)}) must be what its "
        "placements give"
    )


def _require_equal(name: str, tensor: Tensor, saved: TensorStorageMetadata) -> None:
    if tensor.dtype != saved.properties.dtype:
        raise CheckpointError(
            f"tensor {name}: dtype ({tensor.dtype}) must equal that of the checkpoint "
            f"({saved.properties.dtype})"
        )
    if tensor.shape != saved.size:
        raise CheckpointError(
            f"tensor {name}: shape ({list(tensor.shape)}) must equal that of the checkpoint "
            f"({list(saved.size)})"
        )


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - 8} more" if len(ordered) > 8 else ""
    return f"tensors {', '.join(ordered[:8])}{more}"
