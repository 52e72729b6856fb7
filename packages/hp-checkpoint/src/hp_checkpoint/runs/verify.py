"""Checkpoints of a run: found good, or not."""

from pathlib import Path

from hp_base.errors import CheckpointError
from hp_base.folder import DamageError
from hp_checkpoint.checkpoint import Checkpoint, read_manifest
from hp_checkpoint.files import failed
from hp_checkpoint.manifest import MANIFEST, Manifest
from hp_checkpoint.runs.directory import parse_step_name


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the manifest of a checkpoint; its files are not opened.

    Raises:
        CheckpointError: In one line, if it is damaged or cannot be read.
    """
    try:
        return Checkpoint(path, manifest_of_step(path))
    except DamageError as damage:
        raise CheckpointError(f"{path}: {damage}") from None
    except OSError as error:
        raise failed("read", path, error) from None


def verify_checkpoint(path: Path) -> None:
    """Check every byte of one checkpoint, without ranks.

    Args:
        path: Path of the checkpoint itself, such as `checkpoints/step-00000010`.

    Raises:
        CheckpointError: In one line, naming the file and the tensor, if it is damaged; if it
            cannot be read.
    """
    open_checkpoint(path).verify()


def manifest_of_step(path: Path) -> Manifest:
    """Read and check the manifest of a checkpoint that is called after its step.

    Raises:
        DamageError: If it is missing, not what was written, or belongs to another step.
        OSError: If this process cannot read it, which says nothing of the checkpoint.
    """
    manifest = read_manifest(path)
    named = parse_step_name(path.name)
    if named is not None and named[0] != manifest.step:
        raise DamageError(
            f"{MANIFEST}: step ({manifest.step}) must equal that of the name ({named[0]})"
        )
    return manifest
