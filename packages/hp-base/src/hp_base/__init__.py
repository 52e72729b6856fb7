"""Common parts of all packages, without torch: whole files, strangers' folders, one-line errors."""

from hp_base.atomic_write import remove_unfinished, replace_file, replacing
from hp_base.command_line import Parser, run_command, say, scratch, warn, write_named
from hp_base.errors import (
    PREEMPTED,
    CheckpointError,
    ConfigError,
    DataError,
    DifferenceError,
    HangError,
    HpError,
    MachineError,
    NotComparableError,
    NumericsError,
    RankLostError,
    RehearsalError,
    RunDirectoryError,
    RunFailedError,
)
from hp_base.folder import (
    DamageError,
    Folder,
    open_directory,
    open_file,
    opened,
    opened_directory,
    read_named,
    read_whole,
    why_not,
)
from hp_base.lazy import lazily
from hp_base.seeds import derive_seed

__all__ = [
    "PREEMPTED",
    "CheckpointError",
    "ConfigError",
    "DamageError",
    "DataError",
    "DifferenceError",
    "Folder",
    "HangError",
    "HpError",
    "MachineError",
    "NotComparableError",
    "NumericsError",
    "Parser",
    "RankLostError",
    "RehearsalError",
    "RunDirectoryError",
    "RunFailedError",
    "__version__",
    "derive_seed",
    "lazily",
    "open_directory",
    "open_file",
    "opened",
    "opened_directory",
    "read_named",
    "read_whole",
    "remove_unfinished",
    "replace_file",
    "replacing",
    "run_command",
    "say",
    "scratch",
    "warn",
    "why_not",
    "write_named",
]
__version__ = "0.1.0"
