"""Folders that only this user can change: caches, compiled code of libraries, temporary files."""

import atexit
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from multiprocessing import util
from pathlib import Path

from hp_base.atomic_write import closed_at_end
from hp_base.errors import ConfigError, MachineError
from hp_base.folder import why_not

FOLDER = "hp-train-compiled"
CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "PYTORCH_KERNEL_CACHE_PATH": "kernels",
    "CUDA_CACHE_PATH": "cuda",
    "HF_MODULES_CACHE": "modules",
}
"""Variables for folders of code, and the folder in `FOLDER` for a variable that is not set."""
_NO_PLACE = "no folder for temporary files can be written to: set TMPDIR to one that can"
_OTHERS = ("/tmp", "/var/tmp")  # noqa: S108 - folders in them are checked
_RECORDS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Variables for the prefix of files with NCCL's last calls before a time-out; follows links."""
_LONGEST = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")
"""Bytes that the path of a Unix socket may have, without those that multiprocessing adds."""
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def user_cache(name: str) -> Path:
    """Return the path of a folder in ``$XDG_CACHE_HOME`` for files that several runs share.

    Without a home the path does not exist, and cannot be made.
    """
    home = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(home):  # noqa: PTH117
        return Path(home) / name
    try:
        return Path.home() / ".cache" / name
    except RuntimeError:
        return Path(os.devnull) / name


def make_own(path: Path) -> None:
    """Make a folder of this user, if it does not exist.

    Raises:
        OSError: If it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def opened_own(path: Path) -> Iterator[int | None]:
    """Yield the descriptor of a folder of this user alone; None if it is not, or is missing."""
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError:
        yield None
        return
    with closed_at_end(descriptor):
        about = os.fstat(descriptor)
        is_own = about.st_uid == os.geteuid() and not stat.S_IMODE(about.st_mode) & 0o077
        yield descriptor if is_own else None


def own_caches(env: MutableMapping[str, str]) -> None:
    """Set the variables for all caches of code to folders of this user.

    torch, Triton, CUDA and transformers keep code in folders that variables name. Some are by
    default among temporary files, under names that are known: another user who makes such a folder
    first can have their code run. So each is put into the cache of this user, if no part of its
    path can be changed by another user, else into a new folder that is removed with the process. A
    folder that a variable names already is checked likewise. docs/reference/files.md lists other
    files that are read and written outside of a run directory.

    Args:
        env: Environment of this process and of its children; variables are added to it.

    Raises:
        ConfigError: If a variable names a folder that another user can change.
        MachineError: If no folder can be made.
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
    """Set the folder for temporary files of this process and its children to one of this user.

    torch loads generated modules and compiled kernels from temporary folders with known names, and
    has no setting for another place.

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


def short_temporary_folder() -> None:
    """Give multiprocessing's folder of this process a path that is short enough for a socket.

    The path is short because it names an open descriptor, which stays open as long as the process.

    Raises:
        OSError: When there is no folder for temporary files.
    """
    found = tempfile.gettempdir()
    if len(os.fsencode(found)) <= _LONGEST:
        return
    short = f"/proc/self/fd/{os.open(found, os.O_RDONLY | os.O_DIRECTORY)}"
    tempfile.tempdir = short
    try:
        util.get_temp_dir()  # multiprocessing keeps the result
    finally:
        tempfile.tempdir = found


def why_not_kept() -> str:
    """Return the reason why compiled code is not kept from run to run; empty: it is kept."""
    try:
        make_own(user_cache(FOLDER))
    except OSError as error:
        return f"{user_cache(FOLDER)} cannot be made: {why_not(error)}"
    return why_unsafe(user_cache(FOLDER))


def why_unsafe(path: Path) -> str:
    """Return the reason why a folder is not safe for code; empty: only this user can change it."""
    mine = {0, os.geteuid(), *_unmapped()}
    for folder in (path, *path.parents):
        about = folder.lstat()
        mode = stat.S_IMODE(about.st_mode)
        if not stat.S_ISDIR(about.st_mode):
            return f"{folder} is no folder"
        if about.st_uid not in mine:
            return f"{folder} belongs to user {about.st_uid}"
        # Where parent folders are open to the group by default, each user has their own group.
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
    """Return a folder in the cache of this user, else one that is removed with this process."""
    if not why_not_kept():
        return user_cache(FOLDER)
    return Path(_passing(None, f"{FOLDER}-"))


def _own_folder_in(shared: str) -> str:
    """Return a folder for temporary files that only this user can change, a new one if needed."""
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
    """Return a new folder that is removed when this process ends."""
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
    """Return the user id that stands for users of the machine without one in this container."""
    try:
        if Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]:
            return set()
        return {int(Path("/proc/sys/kernel/overflowuid").read_text())}
    except (OSError, ValueError):
        return set()
