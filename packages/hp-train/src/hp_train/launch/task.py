"""What the launcher gives to a rank, and what the rank gives to training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hp_train.config import Config
from hp_train.launch.board import Board
from hp_train.launch.signals import StopFlag

if TYPE_CHECKING:
    from hp_platform import RankInfo


@dataclass(frozen=True)
class Worker:
    """A process of a run, as training sees it.

    Attributes:
        info: Its place among the others.
        run_dir: Where the run is kept.
        board: Takes its heartbeats.
        stop: Whether to save and stop.
    """

    info: RankInfo
    run_dir: Path
    board: Board
    stop: StopFlag


@dataclass(frozen=True)
class Task:
    """What the launcher gives to every process it starts.

    Attributes:
        config: Of the run.
        run_dir: Where the run is kept.
        board: File of the heartbeats.
        launcher_pid: Without which no rank may live.
        entry: ``module:function`` to call with the config and ``worker=``.
    """

    config: Config
    run_dir: Path
    board: Path
    launcher_pid: int
    entry: str


def error_file(run_dir: Path, rank: int) -> Path:
    """Where a rank writes what it failed of: one line, then the traceback."""
    return run_dir / "errors" / f"rank-{rank}.txt"


def stack_file(run_dir: Path, rank: int) -> Path:
    """Where a rank writes its Python stacks on SIGUSR2, and when it crashes."""
    return run_dir / "errors" / f"rank-{rank}.stack.txt"


def drop_empty(stacks: Iterable[Path]) -> None:
    """Remove stack files in which nothing was written, and their folder if that was all."""
    for path in stacks:
        with contextlib.suppress(OSError):
            if path.stat().st_size == 0:
                path.unlink()
            path.parent.rmdir()
