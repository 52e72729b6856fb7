"""Heartbeats: where every rank stands, in memory that all processes of a machine share.

Ranks write, one slot each, and never wait; the launcher reads.
"""

import mmap
import os
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from hp_base.errors import RunDirectoryError
from hp_base.folder import Folder

_HEADER_BYTES = 64
_SLOT_BYTES = 128
_PHASE_BYTES = 64
_BEAT = struct.Struct(f"<QdqB{_PHASE_BYTES}s")
_FATE = struct.Struct("<qidBB")
_FATE_OFFSET = 96


class State(IntEnum):
    """The state of a rank as the launcher sees it."""

    ABSENT = 0
    RUNNING = 1
    RETURNED = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class Slot:
    """The last heartbeat of one rank.

    Attributes:
        rank: Index of the rank.
        sequence: Number of beats.
        beat_at: Monotonic time of the last beat, in seconds.
        step: Steps completed.
        waiting: Whether it was about to wait for other ranks.
        phase: What it was about to do.
        pid: Process id; 0 before it has one.
        status: Exit status, when it has returned or failed.
        ended_at: Monotonic time of that, in seconds.
        state: What became of it.
        is_echo: Whether its failure only says that another rank is gone.
    """

    rank: int
    sequence: int
    beat_at: float
    step: int
    waiting: bool
    phase: str
    pid: int
    status: int
    ended_at: float
    state: State
    is_echo: bool

    @property
    def place(self) -> str:
        """Return where it stands, for a message."""
        return f"step {self.step} ({self.phase or 'start'})"


class Heartbeats:
    """One slot per rank in memory that all processes of a machine share.

    Reading may meet a slot that is half written; it is looked at again soon.

    Args:
        memory: Shared memory of the right size.
        num_ranks: Number of slots.
        rank: The slot that this process writes.
    """

    def __init__(self, memory: mmap.mmap, *, num_ranks: int, rank: int) -> None:
        self.num_ranks = num_ranks
        self._memory = memory
        self._offset = _HEADER_BYTES + rank * _SLOT_BYTES
        self._sequence = 0

    @classmethod
    def create(cls, path: Path, *, num_ranks: int) -> "Heartbeats":
        """Make a file of empty slots; written in full, so that no later write can lack space."""
        with Folder.open(path.parent) as folder, folder.replacing(path.name) as file:
            file.write(bytes(_HEADER_BYTES + num_ranks * _SLOT_BYTES))
        with file:
            memory = mmap.mmap(file.fileno(), 0)
        return cls(memory, num_ranks=num_ranks, rank=0)

    @classmethod
    def attach(cls, path: Path, *, rank: int) -> "Heartbeats":
        """Open the file that the launcher made.

        Raises:
            RunDirectoryError: When it is something else.
        """
        with Folder.open(path.parent) as folder:
            file = os.fdopen(folder.open_file(path.name, os.O_RDWR), "r+b")
        with file:
            size = os.fstat(file.fileno()).st_size
            num_ranks, rest = divmod(size - _HEADER_BYTES, _SLOT_BYTES)
            if rest or not 0 <= rank < num_ranks:
                raise RunDirectoryError(f"{path} ({size} bytes) must have a slot for rank {rank}")
            memory = mmap.mmap(file.fileno(), 0)
        return cls(memory, num_ranks=num_ranks, rank=rank)

    @classmethod
    def unwatched(cls) -> "Heartbeats":
        """Return those that nobody reads, for ranks that are not started by the launcher."""
        return cls(mmap.mmap(-1, _HEADER_BYTES + _SLOT_BYTES), num_ranks=1, rank=0)

    def beat(self, *, step: int, phase: str, waiting: bool = False) -> None:
        """Say where this rank stands; takes about a microsecond.

        Args:
            step: Steps completed.
            phase: What begins now; cut to 64 bytes.
            waiting: Whether this rank is about to wait for others, and so not to blame.
        """
        self._sequence += 1
        _BEAT.pack_into(
            self._memory,
            self._offset,
            self._sequence,
            time.monotonic(),
            step,
            waiting,
            phase.encode()[:_PHASE_BYTES],
        )

    def tell(self, state: State, *, status: int = 0, is_echo: bool = False) -> None:
        """Tell what has become of this rank, and which process it is.

        Args:
            state: RUNNING, RETURNED or FAILED.
            status: Exit status, when it has returned or failed.
            is_echo: Whether its failure only says that another rank is gone.
        """
        _FATE.pack_into(
            self._memory,
            self._offset + _FATE_OFFSET,
            os.getpid(),
            status,
            time.monotonic(),
            state,
            is_echo,
        )

    def request_stop(self) -> None:
        """Ask all ranks to stop; see `hp_base.signals`."""
        self._memory[0] = 1

    def stop_requested(self) -> bool:
        """Tell whether the ranks are asked to stop."""
        return self._memory[0] != 0

    def slots(self) -> list[Slot]:
        """Return what every rank last said, by rank."""
        return [self._slot(rank) for rank in range(self.num_ranks)]

    def _slot(self, rank: int) -> Slot:
        offset = _HEADER_BYTES + rank * _SLOT_BYTES
        sequence, beat_at, step, waiting, phase = _BEAT.unpack_from(self._memory, offset)
        pid, status, ended_at, state, is_echo = _FATE.unpack_from(
            self._memory, offset + _FATE_OFFSET
        )
        return Slot(
            rank=rank,
            sequence=sequence,
            beat_at=beat_at,
            step=step,
            waiting=bool(waiting),
            phase=phase.rstrip(b"\0").decode(errors="replace"),
            pid=pid,
            status=status,
            ended_at=ended_at,
            state=State(state),
            is_echo=bool(is_echo),
        )
