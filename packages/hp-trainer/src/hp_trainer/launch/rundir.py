"""The folder in which a run keeps what it needs to go on."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from hp_base.atomic_write import closed_at_end, lock_holder, try_lock
from hp_base.command_line import say
from hp_base.errors import CheckpointError, ConfigError
from hp_base.folder import Folder
from hp_trainer.config import Config
from hp_trainer.config.options import CONFIG, Resolved, for_saving, to_toml
from hp_trainer.config.rules.files import TOKENIZER
from hp_trainer.launch.task import ERRORS, HEARTBEAT
from hp_trainer.plugins import plugins

CHECKPOINTS, DATA = "checkpoints", "data"
_LOCK = ".lock"
_PICTURES = ("loss.svg", "timeline.svg", "timeline.json")
ORIGINAL, LISTING = "original", "original.json"
"""What a run keeps of the model that it starts from: a folder, and what is in it."""
_FILES = (CONFIG, TOKENIZER, LISTING, _LOCK, HEARTBEAT, "metrics.jsonl", *_PICTURES)
_FOLDERS = (CHECKPOINTS, DATA, ERRORS, "tensorboard")


def make_run_directory(resolved: Resolved) -> Path:
    """Make the folder of a new run, which nobody else has, or find that of a resumed one.

    Raises:
        ConfigError: When it cannot be made.
    """
    run = resolved.config.run
    if run.resume:
        return Path(run.resume)
    base = Path(run.output_dir)
    stem = f"{resolved.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    names = iter([run.name]) if run.name else (f"{stem}-{n}" if n else stem for n in count())
    try:
        base.mkdir(parents=True, exist_ok=True)
        for name in names:
            with suppress(FileExistsError):
                (base / name).mkdir()
                return base / name
    except OSError as error:
        raise ConfigError(
            f'run.output_dir ("{base}") must be a writable folder: {error.strerror}'
        ) from None
    raise ConfigError(
        f'run.name ("{run.name}") must be new in run.output_dir ("{base}"); '
        f"to go on with it: hp train --resume {base / run.name}"
    )


def open_run_directory(path: Path) -> Folder:
    """Open the folder of a run, and refuse what no run puts there.

    The path may be a link or lead through some, nothing below it may: see `hp_base.folder`. Files
    of checkpoints are looked at when one is loaded, and a checkpoint that is not what it must be is
    set aside.

    Raises:
        RunDirectoryError: Naming the first thing that is something else than it must be.
    """
    folder = Folder.open(path)
    for name in _FILES:
        folder.require_file(name)
    for name in _FOLDERS:
        if folder.has(name):
            with folder.sub(name) as inner:
                if name != CHECKPOINTS:
                    inner.require_files()
    return folder


def write_config(folder: Folder, resolved: Resolved) -> None:
    """Put the config into the run directory, in one step and readable from anywhere.

    The tokenizer that it names is copied beside it, for whoever exports or moves the run.

    Raises:
        ConfigError: When the tokenizer cannot be read.
    """
    config = for_saving(resolved)
    folder.remove_unfinished()
    text = to_toml(config, resolved.origins)
    folder.replace(
        CONFIG, text.encode(errors="surrogateescape")
    )  # bytes of a path stay what they are
    tokenizer = config.data.tokenizer
    if tokenizer:
        try:
            folder.replace(TOKENIZER, Path(tokenizer).read_bytes())
        except OSError as error:
            raise ConfigError(f"cannot read data.tokenizer ({tokenizer}): {error}") from None


def finished(folder: Folder, config: Config, *, rank: int = 0, world_size: int = 1) -> Path | None:
    """Return the checkpoint of the last step of a run, if there is one and it is good.

    Args:
        folder: Run directory.
        config: Says which step is the last.
        rank: Rank of this process; every rank checks a share of the files.
        world_size: Number of processes that check together, without hearing of each other.

    Raises:
        CheckpointError: When a share is damaged, and others may have found theirs to be good.
    """
    if not folder.has(CHECKPOINTS):
        return None
    # Imports torch, which a run that has no checkpoint yet need not wait for.
    from hp_base.folder import DamageError  # noqa: PLC0415
    from hp_checkpoint.checkpoint import verify_entries  # noqa: PLC0415
    from hp_checkpoint.collective import share_of  # noqa: PLC0415
    from hp_checkpoint.runs import directory, load  # noqa: PLC0415

    newest = next(iter(directory.complete_checkpoints(folder.path / CHECKPOINTS)), None)
    done = directory.parse_step_name(newest.name) if newest else None
    if newest is None or done is None or done[0] < config.train.steps:
        return None
    try:
        manifest = load.manifest_of_step(newest)
    except (DamageError, OSError):
        return None  # the ranks set it aside, and take the one before
    try:
        share = share_of(manifest, rank=rank, world_size=world_size)
        verify_entries(newest, manifest, share)
    except (DamageError, OSError) as error:
        if world_size == 1:
            return None
        raise CheckpointError(
            f"{newest}: {error}; remove it to go on from the one before"
        ) from None
    return newest


def say_finished(folder: Folder, config: Config, newest: Path) -> int:
    """Say that a run has nothing left to do, and where it is; returns the exit status."""
    name = newest.relative_to(folder.path)
    say(f"nothing to do: all of train.steps ({config.train.steps}) are in {name}\n{folder.path}")
    return 0


@contextmanager
def locked(folder: Folder) -> Iterator[None]:
    """Keep a run directory from being used twice; the lock ends with this process.

    Raises:
        ConfigError: When another process holds it.
    """
    # Some network file systems lock only what is opened for writing; nothing is written.
    flags = os.O_RDWR | os.O_CREAT
    with closed_at_end(folder.open_file(_LOCK, flags, mode=0o600)) as descriptor:
        _require_writers(folder, descriptor)
        if not try_lock(descriptor):
            used = f'run.resume ("{folder.path}") must not be in use by another process'
            who = lock_holder(descriptor)
            raise ConfigError(f"{used}: {who}" if who else used)
        yield


def _require_writers(folder: Folder, descriptor: int) -> None:
    """Let only those lock a run who may write in its directory; to lock, reading is enough."""
    of_group = stat.S_IMODE(os.fstat(folder.descriptor).st_mode) & stat.S_IWGRP
    mode = 0o660 if of_group else 0o600
    with suppress(PermissionError):  # of another user, who has made it so
        if stat.S_IMODE(os.fstat(descriptor).st_mode) != mode:
            os.fchmod(descriptor, mode)


def keep_sources(folder: Folder, resolved: Resolved) -> None:
    """Let packages keep what comes along with a new run, such as the files of its model.

    Args:
        folder: Directory of the run.
        resolved: Config of the run.

    Raises:
        hp_base.errors.ConfigError: When a folder or a file that the config names cannot be read.
    """
    config = resolved.config
    if config.model.transformers or config.run.init_from or config.data.tokenizer:
        for keep in plugins("hp_trainer.originals"):
            keep(folder, resolved)
