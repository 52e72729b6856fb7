"""A save without ranks: chunks that are made one after the other, given to a storage writer."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter

from hp_platform.store import Box, Source


def write_sources(sources: Mapping[str, Source], writer: StorageWriter) -> None:
    """Have a writer save tensors, of which one box at a time is in memory.

    Args:
        sources: Sources of the tensors, by name.
        writer: Storage writer of `torch.distributed.checkpoint`.
    """
    planner = _SourcePlanner(sources)
    metadata = dataclasses.replace(planner.metadata, storage_meta=writer.storage_meta())
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    [plan] = writer.prepare_global_plan([plan])
    written = writer.write_data(plan, planner)
    written.wait()
    writer.finish(metadata, [written.value()])


class _SourcePlanner(SavePlanner):
    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = sources
        self.metadata = Metadata({name: _described(s) for name, s in sources.items()})

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Nothing: the sources are all there is."""

    def create_local_plan(self) -> SavePlan:
        """Every box of every tensor."""
        items = []
        for name, source in self._sources.items():
            described = _described(source)
            for number, chunk in enumerate(described.chunks):
                data = TensorWriteData(chunk, described.properties, described.size)
                index = MetadataIndex(name, chunk.offsets, number)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """That of the only rank."""
        return all_plans, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """As it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Make the values of a box."""
        data = write_item.tensor_data
        assert data is not None, "only tensors are planned"
        box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        return self._sources[write_item.index.fqn].read(box)


def _described(source: Source) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype=source.dtype),
        torch.Size(source.shape),
        [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in source.boxes
        ],
    )
