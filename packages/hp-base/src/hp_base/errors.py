"""Errors that end a run early, and the exit status that says so to a shell or a scheduler.

::

    HpError
    |-- ConfigError      2   a key, a flag or a file named by one is wrong
    |-- DataError        3   the text to train on cannot be used
    |-- CheckpointError  4   a checkpoint cannot be written or read
    |-- HangError        5   no rank made progress for launch.hang_seconds
    |-- NumericsError    6   a loss or a gradient is not finite
    |-- RankLostError    7   a process of the run is gone
    |-- DifferenceError  8   two layouts do not compute the same (hp verify, hp-verify)
    |-- RunDirectoryError 9  the run directory is gone, or holds what no run puts there
    |-- RehearsalError  10   a run would fail, or its ranks not fit together (hp dry-run)
    |-- MachineError    11   the machine refuses what a command needs: a folder, a process, output
    `-- NotComparableError 12  too little of two jobs could be compared to tell (hp-verify)

Any other exception ends with 1. A run that was asked to stop and can be resumed ends with
:data:`PREEMPTED`; one that was stopped at once with 128 + the signal's number, as shells do.
"""

PREEMPTED = 75
"""Stopped on request, to be started again: EX_TEMPFAIL of sysexits.h."""


def told(error: Exception, most: int) -> str:
    """Return the type and message of an error in one line, cut to a number of characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:most]


class HpError(Exception):
    """A failure with a one-line message for the person who started the run."""

    exit_code = 1


class ConfigError(HpError):
    """A key, a flag or a file named by one is wrong; nothing was started."""

    exit_code = 2


class DataError(HpError):
    """The text to train on cannot be used."""

    exit_code = 3


class CheckpointError(HpError, ValueError):
    """A checkpoint cannot be written or read, or lacks tensors or values that a caller needs."""

    exit_code = 4


class HangError(HpError):
    """No rank made progress for ``launch.hang_seconds``."""

    exit_code = 5


class NumericsError(HpError):
    """A loss or a gradient is not finite."""

    exit_code = 6


class RankLostError(HpError):
    """A process of the run is gone."""

    exit_code = 7


class DifferenceError(HpError):
    """Two layouts do not compute the same."""

    exit_code = 8


class RunDirectoryError(HpError):
    """The run directory is gone, cannot be used, or contains files that are not of a run."""

    exit_code = 9


class RehearsalError(HpError):
    """A dry run found an error that a run would have."""

    exit_code = 10


class MachineError(HpError):
    """The machine refuses what a command needs: a folder, a socket, a process, its output."""

    exit_code = 11


class NotComparableError(HpError):
    """Nothing of two jobs, or no gradient and no weight of theirs, could be compared."""

    exit_code = 12


class RunFailedError(HpError):
    """A run inside of a command has failed, and has printed its error itself.

    Args:
        message: Description of the run that failed.
        status: Exit status of the run, which becomes that of the command.
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.exit_code = status
