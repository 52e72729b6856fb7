"""The storage reader of `torch.distributed.checkpoint` over verified safetensors files."""

import os
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from hp_train.checkpoint.files import read_and_hash
from hp_train.checkpoint.manifest import (
    Manifest,
    Part,
    file_header,
    parts_of,
)
from hp_train.checkpoint.planners import DTYPES, metadata_of
from hp_train.checkpoint.together import OnProgress, silent
from hp_train.checkpoint.verify import failed
from hp_train.errors import CheckpointError
from hp_train.folder import opened, opened_directory

_CHANGED = "changed after it was verified; the state is loaded in part and must not be used"


class ManifestReader(StorageReader):
    """Reads a verified checkpoint; every chunk is hashed once more before it is copied."""

    def __init__(self, path: Path, manifest: Manifest, *, on_progress: OnProgress = silent) -> None:
        self._path = path
        self._on_progress = on_progress
        self._manifest = manifest
        self._buffer = torch.empty(0, dtype=torch.uint8)  # memory that is new is slow to touch
        self._header_bytes: dict[int, int] = {}
        by_file: dict[int, list[Part]] = defaultdict(list)
        self._part: dict[tuple[str, tuple[int, ...]], Part] = {}
        for part in parts_of(manifest):
            by_file[part.chunk.file].append(part)
            self._part[part.tensor, part.chunk.offsets] = part
        for file, parts in by_file.items():
            header = file_header(manifest.save_id, manifest.step, parts)
            self._header_bytes[file] = len(header)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a reader serves one checkpoint."""

    def read_metadata(self) -> Metadata:
        """The tensors, as the planners want them; built from the manifest."""
        return metadata_of(self._manifest)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read each chunk once and copy what this rank needs of it."""
        items: dict[MetadataIndex, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            items[item.storage_index].append(item)
        try:
            with opened_directory(self._path) as directory:
                for index, needed in items.items():
                    self._on_progress("read")
                    chunk = self._read(directory, index)
                    for item in needed:
                        _copy(chunk, item, planner)
        except OSError as error:
            raise failed("read", self._path, error) from None
        self._on_progress("read", waiting=True)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def chunk(self, tensor: str, offsets: tuple[int, ...]) -> Tensor:
        """One saved chunk, in new memory, outside of any plan.

        Raises:
            CheckpointError: When it cannot be read or is not what was saved.
        """
        try:
            with opened_directory(self._path) as directory:
                return self._read(
                    directory,
                    MetadataIndex(tensor, torch.Size(offsets)),
                    problem="is not what was saved",
                ).clone()
        except OSError as error:
            raise failed("read", self._path, error) from None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never chosen by its path alone."""
        del checkpoint_id
        return False

    def _read(self, directory: int, index: MetadataIndex, *, problem: str = _CHANGED) -> Tensor:
        """A saved chunk; valid until the next call."""
        part = self._part[index.fqn, tuple(index.offset or ())]
        name = self._manifest.files[part.chunk.file].name
        if self._buffer.numel() < part.nbytes:
            self._buffer = torch.empty(part.nbytes, dtype=torch.uint8)
        data = self._buffer[: part.nbytes]
        with opened(directory, name) as descriptor:
            os.lseek(descriptor, self._header_bytes[part.chunk.file] + part.chunk.begin, 0)
            found = read_and_hash(descriptor, data.numpy().data)
        if found != part.chunk.sha256:
            raise CheckpointError(f"{self._path}/{name}: tensor {part.key} {problem}")
        return data.view(DTYPES[part.dtype]).reshape(part.chunk.sizes)


def _copy(chunk: Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    source = chunk
    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        source = source.narrow(dim, offset, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(source)
    planner.commit_tensor(item, target)
