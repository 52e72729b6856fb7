"""Loading of the newest good checkpoint in the current layout of ranks, and verification."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from hp_base.errors import CheckpointError
from hp_base.folder import DamageError
from hp_checkpoint.checkpoint import Checkpoint, read_manifest
from hp_checkpoint.collective import OnProgress, on_rank_zero, silent, verify_together
from hp_checkpoint.files import failed
from hp_checkpoint.json_file import decode_extra
from hp_checkpoint.load import load
from hp_checkpoint.manifest import MANIFEST, Manifest, decode, encode
from hp_checkpoint.runs.directory import (
    bad_checkpoints,
    complete_checkpoints,
    parse_step_name,
    quarantine,
    remove_leftovers,
)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The properties of a checkpoint that was loaded.

    Attributes:
        step: Number of training steps done.
        extra: JSON object that was saved beside the tensors.
        path: Path of the checkpoint.
        skipped: Path and damage, in one line, of newer checkpoints that were damaged and set aside,
            newest first.
    """

    step: int
    extra: dict[str, Any]
    path: Path
    skipped: list[tuple[Path, str]]


def load_latest(
    directory: Path,
    *,
    tensors: Mapping[str, Tensor],
    group: ProcessGroup,
    on_progress: OnProgress = silent,
) -> Loaded | None:
    """Load the newest good checkpoint into tensors. Every rank of `group` calls.

    The first rank looks for checkpoints and decides for all. Every byte of a checkpoint is verified
    before any tensor changes; a damaged one is renamed to `step-N.bad` and the next older one is
    taken. Tensors are filled in place; a DTensor gets its part, whatever parts were saved.

    Args:
        directory: Directory of the run's checkpoints.
        tensors: Tensors of this rank, by global name. The names of all ranks together must be those
            of the checkpoint, with the same dtypes and shapes.
        group: CPU group.
        on_progress: Function that is called for each chunk.

    Returns:
        Properties of the checkpoint; None if there is no checkpoint, good or bad.

    Raises:
        CheckpointError: On all ranks, in one line: all checkpoints are damaged, one does not fit
            the tensors, or the storage cannot be read. The tensors are unchanged, unless the
            message says otherwise.
        RuntimeError: If a rank is gone.
    """
    candidates = on_rank_zero(lambda: _scan(directory), of=list[str], group=group)
    skipped: list[tuple[Path, str]] = []
    for path in map(Path, candidates):
        text, damage = on_rank_zero(
            lambda: _manifest_or_damage(path),  # noqa: B023
            of=tuple[str, str],
            group=group,
        )
        if not damage:
            manifest = decode(text.encode())
            damage = verify_together(path, manifest, group=group, on_progress=on_progress)
            if not damage:
                _fill(path, manifest, tensors, group, on_progress)
                return Loaded(manifest.step, decode_extra(manifest.extra), path, skipped)
        aside = on_rank_zero(lambda: str(quarantine(path)), of=str, group=group)  # noqa: B023
        skipped.append((Path(aside), damage))
    if skipped:
        listed = "; ".join(f"{path}: {damage}" for path, damage in skipped)
        raise CheckpointError(f"every checkpoint in {directory} is damaged: {listed}")
    set_aside = on_rank_zero(
        lambda: [path.name for path in bad_checkpoints(directory)], of=list[str], group=group
    )
    if set_aside:
        raise CheckpointError(
            f"{directory} has damaged checkpoints only ({', '.join(set_aside)}); "
            "remove them to start anew"
        )
    return None


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint: read its manifest, and none of its files.

    Raises:
        CheckpointError: In one line, if the manifest is damaged or cannot be read.
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
        CheckpointError: In one line, if it is damaged, naming the file and the tensor, or cannot be
            read.
    """
    open_checkpoint(path).verify()


def manifest_of_step(path: Path) -> Manifest:
    """Read and check the manifest of a checkpoint, and its step against the name.

    Raises:
        DamageError: If the manifest is missing, damaged, or of another step.
        OSError: If this process cannot read it, which does not show damage.
    """
    manifest = read_manifest(path)
    named = parse_step_name(path.name)
    if named is not None and named[0] != manifest.step:
        raise DamageError(
            f"{MANIFEST}: step ({manifest.step}) must equal that of the name ({named[0]})"
        )
    return manifest


def _scan(directory: Path) -> list[str]:
    remove_leftovers(directory)
    return [str(path) for path in complete_checkpoints(directory)]


def _manifest_or_damage(path: Path) -> tuple[str, str]:
    try:
        return encode(manifest_of_step(path)).decode(), ""
    except DamageError as damage:
        return "", str(damage)


def _fill(
    path: Path,
    manifest: Manifest,
    tensors: Mapping[str, Tensor],
    group: ProcessGroup,
    on_progress: OnProgress,
) -> None:
    checkpoint = Checkpoint(path, manifest, on_read=lambda: on_progress("read"))
    try:
        load(checkpoint, tensors, group=group)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error.__cause__
