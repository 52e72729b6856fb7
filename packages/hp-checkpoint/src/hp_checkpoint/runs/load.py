"""Loading: the newest checkpoint that is good, under whatever layout the ranks have now."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from hp_base.errors import CheckpointError
from hp_base.folder import DamageError
from hp_checkpoint.checkpoint import Checkpoint
from hp_checkpoint.collective import OnProgress, on_rank_zero, silent, verify_together
from hp_checkpoint.extra import decode_extra
from hp_checkpoint.load import load
from hp_checkpoint.manifest import Manifest, decode, encode
from hp_checkpoint.runs.directory import (
    bad_checkpoints,
    complete_checkpoints,
    quarantine,
    remove_leftovers,
)
from hp_checkpoint.runs.verify import manifest_of_step


@dataclass(frozen=True, slots=True)
class Loaded:
    """Facts of a checkpoint that was loaded, besides the tensors.

    Attributes:
        step: Number of training steps done.
        extra: What was saved beside the tensors.
        path: Path of the checkpoint.
        skipped: Newer ones that were damaged, newest first: where each is now and, in one line,
            what is wrong with it.
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

    The first rank looks for checkpoints and decides for all. Every byte of one is verified before
    any tensor is touched; a damaged one is renamed to `step-N.bad` and the next older one taken.
    Tensors are filled in place; a DTensor takes its part, whatever parts were saved.

    Args:
        directory: Directory of the run's checkpoints.
        tensors: What this rank holds, by global name. The names of all ranks together must be those
            of the checkpoint, with the same dtypes and shapes.
        group: CPU group.
        on_progress: Told what this rank does, chunk by chunk.

    Returns:
        What was loaded; None if there is no checkpoint, good or bad.

    Raises:
        CheckpointError: On all ranks, in one line: all checkpoints are damaged, one does not fit
            the tensors, or the storage cannot be read. The tensors are untouched, unless the
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
