"""Ranks of a job; and jobs of several launches, each of which goes on where the last ended.

A job may be a script that trains some steps, ends and resumes. A process holds a lock for as long
as it lives, beside the number of updates that it has made; one that starts later goes on from the
largest such number whose lock is free. Its weights are not the reference's first ones, so what they
are is taken from the process of its rank that came before it.
"""

import fcntl
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import torch.distributed as dist

from hp_verify.recording.events import COUNTS
from hp_verify.recording.slices import Slice


class Launches:
    """Files by which a launch of a job learns of earlier launches and informs later ones.

    Args:
        folder: The same for all processes of a job.
        rank: Rank of this process.

    Attributes:
        steps: Updates of the weights by launches that have ended.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._known = folder / f"{COUNTS}-slices-{rank:05d}.json"
        self.steps = max(map(_updates_of_ended, folder.glob(f"{COUNTS}-*.count")), default=0)
        path = folder / f"{COUNTS}-{rank:05d}-{os.getpid()}.count"
        self._count = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._count, fcntl.LOCK_EX)  # free when this process has ended, however it does

    def count(self, steps: int) -> None:
        """Say how many updates the job has made."""
        os.pwrite(self._count, b"%8d" % steps, 0)

    def remember(self, slices: Mapping[str, Sequence[Slice]]) -> None:
        """Keep what parameters are of the reference, for a launch that begins with other values."""
        self._known.write_bytes(msgspec.json.encode({**self._read(), **slices}))

    def recall(self, names: Mapping[str, object]) -> dict[str, list[Slice]] | None:
        """Return what parameters were at the first launch; None: this is it, or they are others.

        Args:
            names: Names of parameters -> anything.
        """
        known = self._read() if self.steps else {}
        return {name: known[name] for name in names} if names.keys() <= known.keys() else None

    def _read(self) -> dict[str, list[Slice]]:
        with suppress(FileNotFoundError):
            return msgspec.json.decode(self._known.read_bytes(), type=dict[str, list[Slice]])
        return {}


def parameters_of(folder: Path) -> set[str]:
    """Return what the processes of a job call their parameters.

    Args:
        folder: Folder of the job's recording, in which its processes have left their files.
    """
    files = folder.glob(f"{COUNTS}-slices-*.json")
    return {name for file in files for name in msgspec.json.decode(file.read_bytes())}


def _updates_of_ended(path: Path) -> int:
    """Return the number of updates by a process that has ended; 0 for one that lives."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0
    else:
        return int(os.pread(descriptor, 8, 0) or b"0")
    finally:
        os.close(descriptor)


def is_in_group() -> bool:
    """Tell whether this process is one of a process group."""
    return dist.is_available() and dist.is_initialized()


def rank_here() -> int:
    """Return the rank of this process, by its group or its launcher; 0 where there is one."""
    if is_in_group():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def ranks_here() -> int:
    """Return the number of ranks."""
    if is_in_group():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))
