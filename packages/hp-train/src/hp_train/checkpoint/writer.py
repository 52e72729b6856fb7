"""The storage writer of `torch.distributed.checkpoint`: safetensors files and a manifest.

torch calls, in this order: plans of all ranks to the coordinator,
:meth:`ManifestWriter.prepare_global_plan` there, :meth:`~ManifestWriter.write_data` on all ranks,
:meth:`~ManifestWriter.finish` on the coordinator. An exception in any of them reaches all ranks.
"""

import dataclasses
import hashlib
import os
import platform
import shutil
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

import hp_train
from hp_train.checkpoint.directory import create_staging
from hp_train.checkpoint.files import (
    created,
    write,
)
from hp_train.checkpoint.manifest import (
    DIGEST,
    ITEM_BYTES,
    MANIFEST,
    Chunk,
    Manifest,
    Part,
    SavedFile,
    SavedTensor,
    decode,
    encode,
    file_header,
    key_of,
)
from hp_train.checkpoint.planners import NAME_OF
from hp_train.checkpoint.together import OnProgress, silent
from hp_train.checkpoint.verify import digest_line, failed
from hp_train.errors import CheckpointError
from hp_train.folder import DamageError, opened_directory


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the coordinator tells a rank: where to write, and under which identity."""

    staging: Path
    file: int
    save_id: str


class ManifestWriter(StorageWriter):
    """Writes one checkpoint into a staging directory; the caller commits or discards it.

    Attributes:
        staging: Where the checkpoint is, once the coordinator has made the directory.
        directory: Of the run's checkpoints.
        on_progress: Told what this rank does, chunk by chunk.
    """

    def __init__(
        self, directory: Path, *, step: int, extra: bytes, on_progress: OnProgress = silent
    ) -> None:
        self.staging: Path | None = None
        self.directory = directory
        self._step = step
        self._extra = extra
        self._save_id = uuid4().hex
        self._lock: int | None = None
        self.on_progress = on_progress

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a writer serves one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the staging directory, on the coordinator, and tell every rank its file."""
        try:
            self.staging, self._lock = create_staging(self.directory, self._step)
        except OSError as error:
            raise failed("create a checkpoint in", self.directory, error) from None
        return [
            dataclasses.replace(plan, storage_data=Assignment(self.staging, rank, self._save_id))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the chunks of this rank; their places and hashes go to the coordinator."""
        assignment: Assignment = plan.storage_data
        self.staging = assignment.staging
        layout = _lay_out(plan.items, assignment.file)
        results: list[WriteResult] = []
        path = assignment.staging / _file_name(assignment.file)
        try:
            if layout:
                header = file_header(assignment.save_id, self._step, [part for part, _ in layout])
                results = _write_file(path, header, layout, planner, self.on_progress)
        except DamageError as damage:
            raise CheckpointError(f"cannot write {path}: {damage}") from None
        except OSError as error:
            raise failed("write", path, error) from None
        self.on_progress("write", waiting=True)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest, on the coordinator, and put the directory's names on the disk."""
        if self.staging is None:
            raise CheckpointError("a staging directory must exist before a checkpoint is finished")
        self.on_progress("write the manifest")
        text = encode(self._manifest(metadata, results))
        try:
            decode(text)  # never write what a load would refuse
            with opened_directory(self.staging) as directory:
                for name, data in ((MANIFEST, text), (DIGEST, digest_line(text))):
                    with created(name, directory) as descriptor:
                        write(descriptor, memoryview(data))
                os.fsync(directory)
        except DamageError as damage:
            raise CheckpointError(f"cannot save: {damage}") from None
        except OSError as error:
            raise failed("write", self.staging / MANIFEST, error) from None

    def discard(self) -> None:
        """Remove the staging directory if it was not committed. On the coordinator."""
        if self._lock is None:
            return
        if self.staging is not None:
            shutil.rmtree(self.staging, ignore_errors=True)
        os.close(self._lock)
        self._lock = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never chosen by its path alone."""
        del checkpoint_id
        return False

    def _manifest(self, metadata: Metadata, results: list[list[WriteResult]]) -> Manifest:
        """What the ranks wrote, from the plan that all agreed on and what each reported."""
        written = [rank for rank, of_rank in enumerate(results) if of_rank]
        stored: dict[str, list[Chunk]] = defaultdict(list)
        nbytes: dict[int, int] = {}
        for file, rank in enumerate(written):
            for result in results[rank]:
                chunk: Chunk
                chunk, nbytes[file] = result.storage_data
                stored[result.index.fqn].append(msgspec.structs.replace(chunk, file=file))
        tensors = {
            name: SavedTensor(
                dtype=NAME_OF[entry.properties.dtype],
                shape=tuple(entry.size),
                chunks=tuple(stored[name]),
            )
            for name, entry in sorted(metadata.state_dict_metadata.items())
            if isinstance(entry, TensorStorageMetadata)
        }
        return Manifest(
            format="hp-checkpoint",
            version=1,
            save_id=self._save_id,
            step=self._step,
            world_size=len(results),
            software={
                "hp_train": hp_train.__version__,
                "python": platform.python_version(),
                "torch": str(torch.__version__),
            },
            extra=msgspec.Raw(self._extra),
            files=tuple(
                SavedFile(_file_name(rank), nbytes[file]) for file, rank in enumerate(written)
            ),
            tensors=tensors,
        )


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _lay_out(items: list[WriteItem], file: int) -> list[tuple[Part, WriteItem]]:
    """Where each chunk goes: wide dtypes first, so that all are aligned; none without elements."""
    named = []
    for item in items:
        data = item.tensor_data
        if data is not None and data.chunk.sizes.numel():
            offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
            chunk = Chunk(file, 0, offsets, sizes, "")
            key = key_of(item.index.fqn, tuple(data.size), chunk)
            named.append((NAME_OF[data.properties.dtype], key, chunk, item))
    named.sort(key=lambda entry: (-ITEM_BYTES[entry[0]], entry[1]))
    layout: list[tuple[Part, WriteItem]] = []
    begin = 0
    for dtype, key, chunk, item in named:
        placed = msgspec.structs.replace(chunk, begin=begin)
        part = Part(item.index.fqn, dtype, key, placed)
        layout.append((part, item))
        begin = part.end
    return layout


def _write_file(
    path: Path,
    header: bytes,
    layout: list[tuple[Part, WriteItem]],
    planner: SavePlanner,
    on_progress: OnProgress,
) -> list[WriteResult]:
    """Stream the chunks to a new file: one at a time leaves the device."""
    results = []
    total = len(header) + layout[-1][0].end
    with opened_directory(path.parent) as staging, created(path.name, staging) as descriptor:
        write(descriptor, memoryview(header))
        for part, item in layout:
            on_progress("write")
            data = planner.resolve_data(item)
            if not isinstance(data, Tensor):
                raise CheckpointError(f"tensor {part.key}: type must be Tensor")
            hasher = hashlib.sha256()
            write(descriptor, _bytes_of(data), hasher)
            chunk = msgspec.structs.replace(part.chunk, sha256=hasher.hexdigest())
            results.append(WriteResult(item.index, part.nbytes, (chunk, total)))
    return results


def _bytes_of(data: Tensor) -> memoryview:
    """Bytes of a chunk in row-major order."""
    local = data.detach().cpu().contiguous()
    return local.reshape(-1).view(torch.uint8).numpy().data
