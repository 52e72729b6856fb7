"""Checkpoints of plain `torch.distributed.checkpoint`: read without unpickling, and written.

torch reads its checkpoints with `pickle`, which runs any code in a file, and does not notice a
flipped bit. Here `pickled` interprets the few instructions that torch writes and no others,
`metadata` checks the description of the tensors, `tensors` reads values and their checksums and
writes them, and the functions of this module give them to a save of either kind.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from hp_base.errors import CheckpointError
from hp_base.folder import DamageError
from hp_checkpoint.boxes import Box
from hp_checkpoint.checkpoint import Checkpoint, reading
from hp_checkpoint.dcp.metadata import StoredTensor, read_metadata
from hp_checkpoint.dcp.tensors import read_box, write_sources
from hp_checkpoint.manifest import DTYPES
from hp_checkpoint.save import Source

__all__ = ["read_sources", "sources_in", "write_sources"]


def read_sources(folder: Path) -> tuple[dict[str, Source], tuple[str, ...]]:
    """Read the description of a checkpoint of `torch.distributed.checkpoint`, also of a stranger.

    Args:
        folder: Folder with `.metadata` and `.distcp` files.

    Returns:
        Sources of its tensors by name, whose values are read when they are saved, and the names of
        other entries, which are pickled and left out.

    Raises:
        hp_base.CheckpointError: If the checkpoint is hostile or damaged, or a file cannot be read.
            A source may raise it as well, when its values are read.
    """
    with reading(folder):
        stored = read_metadata(folder)
    found = {name: _source(folder, name, tensor) for name, tensor in stored.tensors.items()}
    return found, stored.left_out


def sources_in(checkpoint: Checkpoint) -> Mapping[str, Source]:
    """Return the tensors of a checkpoint as sources; each chunk is compared with its hash.

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
    @reading(folder)
    def read(box: Box) -> Tensor:
        try:
            return read_box(folder, tensor.boxes[box], dtype=tensor.dtype, sizes=box[1])
        except DamageError as damage:
            raise CheckpointError(f"{folder}: tensor {name}: {damage}") from None

    return Source(DTYPES[tensor.dtype], tensor.shape, tuple(tensor.boxes), read)
