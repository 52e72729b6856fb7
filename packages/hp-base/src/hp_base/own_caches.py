"""Folders from which libraries load code that they have compiled: those of this user alone."""

import atexit
import os
import shutil
import stat
import tempfile
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

from hp_base.errors import ConfigError, MachineError
from hp_base.folder import why_not
from hp_base.user_cache import make_own, user_cache

FOLDER = "hp-train-compiled"
CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "PYTORCH_KERNEL_CACHE_PATH": "kernels",
    "CUDA_CACHE_PATH": "cuda",
    "HF_MODULES_CACHE": "modules",
}
"""Variables that name a folder of code, and the folder in `FOLDER` where they name none."""
_NO_PLACE = "no folder for temporary files can be written to: set TMPDIR to one that can"
_OTHERS = ("/tmp", "/var/tmp")  # noqa: S108 - what is taken there is looked at
_RECORDS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""What NCCL did before a time-out; the name begins with this, and a link there is followed."""


def own_caches(env: MutableMapping[str, str]) -> None:
    """Name folders of this user for all caches of code.

    torch, Triton, CUDA and transformers keep code in folders that variables name, by default some
    of them among temporary files, under names that everybody knows: who makes one first has their
    code run by the next. So each of them is in a folder in the cache of this user, of whose path no
    part belongs to another user or can be exchanged by one; where there is none, in a new folder
    that ends with the process. A folder that a variable names is looked at alike.
    docs/reference/files.md lists what else is read and written outside of a run directory.

    Args:
        env: Environment of this process and of those that it starts; names are added to it.

    Raises:
        ConfigError: When a variable names a folder that another user can change.
        MachineError: When no folder can be made.
    """
    for name in CACHES:
        if env.get(name):
            env[name] = _named(name, env[name])
    missing = [name for name in CACHES if not env.get(name)]
    if missing:
        folder = _folder()
        for name in missing:
            path = folder / CACHES[name]
            path.mkdir(mode=0o700, exist_ok=True)
            env[name] = str(path)
        if not any(name in env for name in _RECORDS):
            env[_RECORDS[0]] = str(folder / "flight-")


def own_temporary_folder(env: MutableMapping[str, str]) -> None:
    """Have temporary files of this process, and of those that it starts, in a folder of this user.

    Of some of them everybody knows the name: torch loads generated modules and compiled kernels
    from folders there, and takes no other place.

    Args:
        env: Environment of this process.

    Raises:
        MachineError: When no folder for temporary files can be written to.
    """
    try:
        shared = tempfile.gettempdir()
    except FileNotFoundError:
        raise MachineError(_NO_PLACE) from None
    env["TMPDIR"] = tempfile.tempdir = _own_folder_in(shared)


def why_not_kept() -> str:
    """Say why compiled code is not kept from run to run; empty: it is."""
    try:
        make_own(user_cache(FOLDER))
    except OSError as error:
        return f"{user_cache(FOLDER)} cannot be made: {why_not(error)}"
    return why_unsafe(user_cache(FOLDER))


def why_unsafe(path: Path) -> str:
    """Say why code must not be loaded from a folder; empty: only this user can change it."""
    mine = {0, os.geteuid(), *_unmapped()}
    for folder in (path, *path.parents):
        about = folder.lstat()
        mode = stat.S_IMODE(about.st_mode)
        if not stat.S_ISDIR(about.st_mode):
            return f"{folder} is no folder"
        if about.st_uid not in mine:
            return f"{folder} belongs to user {about.st_uid}"
        # Users have groups of their own where folders above are open to the group by default.
        is_open = mode & 0o002 or (mode & 0o020 and about.st_gid not in (0, os.getegid()))
        if (mode & 0o022) if folder is path else (is_open and not mode & stat.S_ISVTX):
            return f"others can write to {folder} (mode {mode:o})"
    return ""


def _named(name: str, value: str) -> str:
    """Return the path without links of a folder that a variable names."""
    path = Path(os.path.realpath(value))
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        why = why_unsafe(path)
    except (OSError, ValueError) as error:
        why = why_not(error)
    if why:
        raise ConfigError(
            f'{name} ("{value}") must be a folder that only this user can change: {why}; '
            "unset it, or name another"
        )
    return str(path)


def _folder() -> Path:
    """In the cache of this user; where that cannot be, one that ends with this process."""
    if not why_not_kept():
        return user_cache(FOLDER)
    return Path(_passing(None, f"{FOLDER}-"))


def _own_folder_in(shared: str) -> str:
    """A folder for temporary files that only this user can change; one that passes, if need be."""
    if not why_unsafe(Path(os.path.realpath(shared))):
        return shared
    for folder in dict.fromkeys((shared, *_OTHERS)):
        own = Path(os.path.realpath(folder)) / f"hp-train-{os.geteuid()}"
        with suppress(OSError):
            own.mkdir(mode=0o700, exist_ok=True)
            if not why_unsafe(own) and os.access(own, os.W_OK):
                return str(own)
    return _passing(shared, "hp-train-")


def _passing(folder: str | None, prefix: str) -> str:
    """Return a new folder that ends with this process."""
    try:
        made = tempfile.mkdtemp(prefix=prefix, dir=folder)
    except OSError as error:
        raise MachineError(f"{_NO_PLACE}: {why_not(error)}") from None
    atexit.register(_remove, made, os.getpid())
    return made


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _unmapped() -> set[int]:
    """Find the number that users of the machine have who have none in this container."""
    try:
        if Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]:
            return set()
        return {int(Path("/proc/sys/kernel/overflowuid").read_text())}
    except (OSError, ValueError):
        return set()
