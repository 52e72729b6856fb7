"""Tensors of a checkpoint of plain torch, to be saved again, and of one of ours, to be exported."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from hp_base.errors import CheckpointError
from hp_base.folder import DamageError
from hp_checkpoint.boxes import Box
from hp_checkpoint.checkpoint import Checkpoint
from hp_checkpoint.dcp.metadata import StoredTensor, read_metadata
from hp_checkpoint.dcp.tensors import read_box
from hp_checkpoint.files import failed
from hp_checkpoint.manifest import DTYPES
from hp_checkpoint.save import Source


def read_sources(folder: Path) -> tuple[dict[str, Source], tuple[str, ...]]:
    """Look at a checkpoint of `torch.distributed.checkpoint`, whoever wrote it.

    Args:
        folder: Folder with `.metadata` and `.distcp` files.

    Returns:
        Sources of its tensors by name, whose values are read when they are saved, and the names of
        what is left out: no tensors, and pickled.

    Raises:
        hp_base.CheckpointError: When the checkpoint is hostile or damaged, or a file cannot
            be read. So may a source, when its values are read.
    """
    try:
        stored = read_metadata(folder)
    except DamageError as damage:
        raise CheckpointError(f"{folder}: {damage}") from None
    except OSError as error:
        raise failed("read", folder, error) from None
    found = {name: _source(folder, name, tensor) for name, tensor in stored.tensors.items()}
    return found, stored.left_out


def sources_in(checkpoint: Checkpoint) -> Mapping[str, Source]:
    """Take the tensors of a checkpoint chunk by chunk, each compared with its hash.

    Args:
        checkpoint: An open checkpoint.
    """
    return {
        name: Source(
            DTYPES[tensor.dtype],
            tensor.shape,
            tuple(chunk.box for chunk in tensor.chunks),
            partial(_chunk, checkpoint, name),
        )
        for name, tensor in checkpoint.manifest.tensors.items()
    }


def _chunk(checkpoint: Checkpoint, name: str, box: Box) -> Tensor:
    return checkpoint.chunk(name, box.offsets)


def _source(folder: Path, name: str, tensor: StoredTensor) -> Source:
    def read(box: Box) -> Tensor:
        try:
            return read_box(folder, tensor.boxes[box], dtype=tensor.dtype, sizes=box[1])
        except DamageError as damage:
            raise CheckpointError(f"{folder}: tensor {name}: {damage}") from None

    return Source(DTYPES[tensor.dtype], tensor.shape, tuple(tensor.boxes), read)
