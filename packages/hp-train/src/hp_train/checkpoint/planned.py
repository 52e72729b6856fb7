"""A save and a load of planned chunks, between ranks that tell each other JSON.

Planners, writers and readers are those of `torch.distributed.checkpoint`, called in the order in
which torch calls them. torch would pass plans and results between ranks as pickles; here each rank
sends what the first one needs of its own, in a stated form, and the first answers which of its
chunks each writes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from hp_platform import all_gather_json
from hp_train.checkpoint.manifest import Chunk, DtypeName
from hp_train.checkpoint.planners import DTYPES, NAME_OF, StrictLoadPlanner, StrictSavePlanner
from hp_train.checkpoint.reader import ManifestReader
from hp_train.checkpoint.together import on_first_rank, run_together
from hp_train.checkpoint.writer import Assignment, ManifestWriter
from hp_train.errors import CheckpointError

T = TypeVar("T")


class _Held(NamedTuple):
    """A chunk that a rank could write: of what tensor, where in it, and how large."""

    name: str
    dtype: DtypeName
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    is_shard: bool


class _Written(NamedTuple):
    """A chunk that a rank has written, and the bytes of its file."""

    name: str
    chunk: Chunk
    total: int


class _Orders(NamedTuple):
    """Where all write, under which identity, and which of its chunks each rank."""

    staging: str
    save_id: str
    kept: list[list[int]]


def save_planned(
    tensors: Mapping[str, Tensor],
    writer: ManifestWriter,
    planner: StrictSavePlanner,
    *,
    group: ProcessGroup,
) -> None:
    """Write all chunks of all ranks, each once, and the manifest. Every rank of `group` calls.

    Raises:
        CheckpointError: On all ranks, naming one that failed and its error.
        RuntimeError: If a rank is gone.
    """
    is_first = group.rank() == 0
    metadata: list[Metadata] = []

    def plan() -> SavePlan:
        planner.set_up_planner(dict(tensors), is_coordinator=is_first)
        writer.set_up_storage_writer(is_first)
        return writer.prepare_local_plan(planner.create_local_plan())

    local = run_together(plan, group=group)
    held = _gather([_held(item) for item in local.items], group)

    def decide() -> _Orders:
        everyones = _decoded(held, list[_Held])
        plans = [SavePlan([_item(one) for one in of_rank]) for of_rank in everyones]
        chosen, described = planner.create_global_plan(plans)
        metadata.append(described)
        chosen = writer.prepare_global_plan(chosen)
        assignment: Assignment = chosen[0].storage_data
        places = [{_key(item): n for n, item in enumerate(plan.items)} for plan in plans]
        kept = [[at[_key(i)] for i in p.items] for at, p in zip(places, chosen, strict=True)]
        return _Orders(str(assignment.staging), assignment.save_id, kept)

    orders = on_first_rank(decide, of=_Orders, group=group)

    def write() -> list[WriteResult]:
        mine = SavePlan(
            [local.items[n] for n in orders.kept[group.rank()]],
            storage_data=Assignment(Path(orders.staging), group.rank(), orders.save_id),
        )
        written = writer.write_data(planner.finish_plan(mine), planner)
        written.wait()
        return written.value()

    results = run_together(write, group=group)
    reports = _gather([_Written(r.index.fqn, *r.storage_data) for r in results], group)

    def finish() -> str:
        everyones = _decoded(reports, list[_Written])
        writer.finish(metadata[0], [[_result(one) for one in rank] for rank in everyones])
        return ""

    on_first_rank(finish, of=str, group=group)


def load_planned(
    tensors: Mapping[str, Tensor],
    reader: ManifestReader,
    planner: StrictLoadPlanner,
    *,
    group: ProcessGroup,
) -> None:
    """Fill the tensors of all ranks. Every rank of `group` calls.

    Raises:
        CheckpointError: On all ranks, naming one that failed and its error.
        RuntimeError: If a rank is gone.
    """
    is_first = group.rank() == 0

    def plan() -> LoadPlan:
        metadata = reader.read_metadata()
        planner.set_up_planner(dict(tensors), metadata, is_first)
        reader.set_up_storage_reader(metadata, is_first)
        return reader.prepare_local_plan(planner.create_local_plan())

    local = run_together(plan, group=group)
    names = _gather(local.planner_data, group)

    def check() -> str:
        everyones = _decoded(names, list[str])
        planner.create_global_plan([LoadPlan([], planner_data=wanted) for wanted in everyones])
        return ""

    on_first_rank(check, of=str, group=group)
    run_together(lambda: reader.read_data(planner.finish_plan(local), planner).wait(), group=group)


def _gather(value: object, group: ProcessGroup) -> list[str]:
    """Tell all ranks as text, which the first alone reads: there may be a million chunks."""
    return all_gather_json(msgspec.json.encode(value).decode(), of=str, group=group)


def _decoded(texts: Sequence[str], of: type[T]) -> list[T]:
    found = []
    for rank, text in enumerate(texts):
        try:
            found.append(msgspec.json.decode(text, type=of))
        except msgspec.DecodeError as error:
            raise CheckpointError(f"what rank {rank} of the group sent: {error}") from None
    return found


def _held(item: WriteItem) -> _Held:
    data = item.tensor_data
    assert data is not None, "only tensors are planned"
    dtype, chunk = NAME_OF[data.properties.dtype], data.chunk
    boxes = tuple(data.size), tuple(chunk.offsets), tuple(chunk.sizes)
    return _Held(item.index.fqn, dtype, *boxes, item.type == WriteItemType.SHARD)


def _item(held: _Held) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(held.offsets), torch.Size(held.sizes))
    properties = TensorProperties(dtype=DTYPES[held.dtype])
    return WriteItem(
        MetadataIndex(held.name, held.offsets),
        WriteItemType.SHARD if held.is_shard else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(chunk, properties, torch.Size(held.shape)),
    )


def _result(written: _Written) -> WriteResult:
    index = MetadataIndex(written.name, written.chunk.offsets)
    return WriteResult(index, 0, (written.chunk, written.total))


def _key(item: WriteItem) -> tuple[str, tuple[int, ...]]:
    return item.index.fqn, tuple(item.index.offset or ())
