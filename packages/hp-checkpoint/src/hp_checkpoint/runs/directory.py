"""The directory of a run's checkpoints: names, leftovers, commit, quarantine, purge.

::

    step-00000010            complete: renamed to this when everything was on the disk
    step-00000010.1          saved again at the same step; newer than the one without a number
    step-00000020.tmp-<id>   being written, or removed; locked as long as its writer lives
    step-00000020.bad        found damaged by a load and set aside; also .bad-1, .bad-2, ...

Only one rank calls these functions.
"""

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

from hp_base.atomic_write import names_in
from hp_base.errors import CheckpointError
from hp_checkpoint import files
from hp_checkpoint.files import opened_parent, rename, staging_name

_COMPLETE = re.compile(r"\Astep-([0-9]{8,16})(?:\.([0-9]{1,6}))?\Z")
_STAGING = re.compile(r"\Astep-[0-9.]+\.tmp-[0-9a-f]{32}\Z")
_BAD = re.compile(r"\Astep-[0-9.]+\.bad(-[0-9]+)?\Z")

_log = logging.getLogger(__name__)


def step_name(step: int, attempt: int = 0) -> str:
    """Return the name of a complete checkpoint."""
    return f"step-{step:08d}" + (f".{attempt}" if attempt else "")


def parse_step_name(name: str) -> tuple[int, int] | None:
    """Return the step and attempt of a name; None if it is not one of :func:`step_name`."""
    match = _COMPLETE.match(name)
    if match is None:
        return None
    step, attempt = int(match[1]), int(match[2] or 0)
    return (step, attempt) if step_name(step, attempt) == name else None


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return checkpoints with the name of a complete one, newest first; opens no files."""
    found = [(key, name) for name in _names(directory) if (key := parse_step_name(name))]
    return [directory / name for _, name in sorted(found, reverse=True)]


def newest_checkpoint(directory: Path, *, step: int | None = None) -> Path:
    """Return the newest complete checkpoint, of all or of one step; opens no files.

    Raises:
        CheckpointError: If there is none.
    """
    found = complete_checkpoints(directory)
    if step is not None:
        found = [path for path in found if (parse_step_name(path.name) or (None,))[0] == step]
    if not found:
        which = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        raise CheckpointError(f"{directory} must have {which}")
    return found[0]


def bad_checkpoints(directory: Path) -> list[Path]:
    """Return checkpoints that were set aside as damaged."""
    return [directory / name for name in sorted(_names(directory)) if _BAD.match(name)]


def commit(staging: Path, step: int) -> Path:
    """Rename a written directory to its final name, flushed to the disk; return the path.

    An existing checkpoint of that name is not replaced: the new one gets the next number.
    """
    return rename(staging, _first_free(step_name(step, n) for n in count()))


def remove_leftovers(directory: Path) -> None:
    """Remove directories that dead runs left while saving or purging."""
    files.remove_leftovers(directory, _STAGING.match)


def quarantine(path: Path) -> Path:
    """Rename a damaged checkpoint; return its new path, or the old one if that is impossible."""
    names = (f"{path.name}.bad" + (f"-{n}" if n else "") for n in count())
    try:
        return rename(path, _first_free(names))
    except OSError as error:
        _log.warning("cannot rename damaged checkpoint %s: %s", path, error.strerror)
        return path


def _first_free(names: Iterator[str]) -> Callable[[set[str]], str]:
    """Return a function that chooses the first of some names that is not taken."""
    return lambda taken: next(name for name in names if name not in taken)


def purge(newest: Path, *, keep: int, keep_every: int = 0) -> None:
    """Remove checkpoints older than `newest` except those of `keep` - 1 steps.

    Older checkpoints of the same step are removed as well. One that cannot be removed is left with
    a warning.

    Args:
        newest: The complete checkpoint that was just saved.
        keep: Number of newest steps to keep, each with its newest checkpoint.
        keep_every: Steps that are a multiple of it are kept as well; 0: none.
    """
    mine = parse_step_name(newest.name)
    seen = {mine[0]} if mine else set()
    num_steps = 0
    try:
        candidates = complete_checkpoints(newest.parent)
    except OSError as error:
        _log.warning("cannot look for old checkpoints in %s: %s", newest.parent, error.strerror)
        return
    for path in candidates:
        key = parse_step_name(path.name)
        if mine is None or key is None or key >= mine:
            continue
        was_saved_again = key[0] in seen
        seen.add(key[0])
        num_steps += not was_saved_again
        is_for_good = keep_every > 0 and key[0] % keep_every == 0
        if was_saved_again or (num_steps >= keep and not is_for_good):
            _remove(path)


def _remove(path: Path) -> None:
    """Remove a checkpoint, renamed first: a kill leaves no incomplete one under its name."""
    name = staging_name(path.name)
    try:
        with opened_parent(path.parent) as directory:
            os.rename(path.name, name, src_dir_fd=directory, dst_dir_fd=directory)
            shutil.rmtree(name, ignore_errors=True, dir_fd=directory)
    except OSError as error:
        _log.warning("cannot remove old checkpoint %s: %s", path, error.strerror)


def _names(directory: Path) -> list[str]:
    if not os.path.lexists(directory):
        return []
    with opened_parent(directory) as descriptor:
        return names_in(descriptor)
