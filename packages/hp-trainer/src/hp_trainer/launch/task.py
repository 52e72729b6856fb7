"""The task that the launcher gives to a rank, and the worker that the rank gives to training."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from hp_base.errors import RunDirectoryError
from hp_base.folder import Folder
from hp_base.signals import StopFlag
from hp_trainer.config import Config
from hp_trainer.launch.heartbeats import Heartbeats

if TYPE_CHECKING:
    from hp_platform import RankInfo

HEARTBEAT = "heartbeat"
ERRORS = "errors"
"""Folder of what ranks say that fail, in the run directory."""
_LONGEST = 16 << 20


@dataclass(frozen=True)
class Worker:
    """A process of a run, as training sees it.

    Attributes:
        info: Its place among the others.
        run_dir: Where the run is kept.
        heartbeats: Takes its heartbeats.
        stop: Whether to save and stop.
        data: Where the tokens are; None: in the run directory.
    """

    info: RankInfo
    run_dir: Path
    heartbeats: Heartbeats
    stop: StopFlag
    data: Path | None = None

    @cached_property
    def folder(self) -> Folder:
        """Return the run directory, opened once in this process."""
        return Folder.open(self.run_dir)

    @property
    def data_dir(self) -> Path:
        """Return where the tokens are."""
        return self.data or self.run_dir / "data"


@dataclass(frozen=True)
class Task:
    """The task of every process that the launcher starts.

    Attributes:
        config: Configuration of the run.
        run_dir: Where the run is kept.
        launcher_pid: Process id of the launcher, without which no rank may live.
        entry: ``module:function`` to call with the config and ``worker=``.
        data: Where the tokens are; None: in the run directory.
    """

    config: Config
    run_dir: Path
    launcher_pid: int
    entry: str
    data: Path | None = None

    @property
    def heartbeats(self) -> Path:
        """Return the file of the heartbeats."""
        return self.run_dir / HEARTBEAT


def error_file(rank: int) -> str:
    """Return where a rank writes what it failed of: one line, then the traceback."""
    return f"rank-{rank}.txt"


def stack_file(rank: int) -> str:
    """Return where a rank writes its Python stacks on SIGUSR2, and when it crashes."""
    return f"rank-{rank}.stack.txt"


def read_error(folder: Folder, name: str) -> list[str]:
    """Return the lines of a file of :data:`ERRORS`; none where there is none to be read."""
    try:
        with folder.sub(ERRORS) as errors:
            return errors.read(name, limit=_LONGEST).decode(errors="replace").splitlines()
    except RunDirectoryError:
        return []


def drop_empty(folder: Folder, names: Iterable[str]) -> None:
    """Remove stack files in which nothing was written, and their folder if that was all."""
    with contextlib.suppress(RunDirectoryError, OSError):
        with folder.sub(ERRORS) as errors:
            for name in names:
                if errors.size(name) == 0:
                    errors.remove(name)
        os.rmdir(ERRORS, dir_fd=folder.descriptor)
