"""A save without ranks: a storage writer gets chunks that are read one after the other."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter

from hp_checkpoint.boxes import Box
from hp_checkpoint.save import Source


def write_sources(sources: Mapping[str, Source], writer: StorageWriter) -> None:
    """Save tensors by a storage writer, with one box at a time in memory.

    Args:
        sources: Sources of the tensors, by name.
        writer: Storage writer of `torch.distributed.checkpoint`.
    """
    described = {name: _described(source) for name, source in sources.items()}
    metadata = Metadata({**described}, storage_meta=writer.storage_meta())
    items = [item for name, tensor in described.items() for item in _items(name, tensor)]
    writer.set_up_storage_writer(True)
    [plan] = writer.prepare_global_plan([writer.prepare_local_plan(SavePlan(items))])
    written = writer.write_data(plan, _SourcePlanner(sources))
    written.wait()
    writer.finish(metadata, [written.value()])


class _SourcePlanner(DefaultSavePlanner):
    """The planner of a save whose values are read from sources."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        super().__init__()
        self._sources = sources

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the values of a box."""
        data = write_item.tensor_data
        assert data is not None, "only tensors are planned"
        box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        return self._sources[write_item.index.fqn].read(box)


def _items(name: str, tensor: TensorStorageMetadata) -> Iterator[WriteItem]:
    """Yield an item for every box of a tensor."""
    for number, chunk in enumerate(tensor.chunks):
        data = TensorWriteData(chunk, tensor.properties, tensor.size)
        index = MetadataIndex(name, chunk.offsets, number)
        yield WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _described(source: Source) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype=source.dtype),
        torch.Size(source.shape),
        [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in source.boxes
        ],
    )
