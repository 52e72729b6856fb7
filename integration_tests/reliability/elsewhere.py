"""A program of ours as on a system that lacks what only Linux has: macOS, as far as Python sees it.

    python integration_tests/reliability/elsewhere.py hp_schedule.cli generate 1f1b --ranks 4 ...

The standard library and torch are imported first, then names that macOS does not have are taken
away, `/proc` is hidden, and only then anything of ours is imported and runs.
"""

from __future__ import annotations

import builtins
import ctypes
import fcntl
import importlib
import mmap
import os
import pkgutil
import re
import resource
import select
import signal
import socket
import sys
import tempfile
from types import ModuleType
from typing import Any, NoReturn

_HIDDEN = re.compile(r"/(proc|sys|dev/shm)(/|$)")
_ABSENT = {
    os: r"pidfd_\w+|P_PIDFD|memfd_create|MFD_\w+|pipe2|sched_(?!yield|get_priority)\w+"
    r"|SCHED_(BATCH|IDLE|RESET_ON_FORK)|posix_f\w+|POSIX_FADV_\w+|copy_file_range|splice|SPLICE_\w+|eventfd\w*|EFD_\w+|timerfd\w*"
    r"|(get|set|list|remove)xattr|XATTR_\w+|O_(TMPFILE|PATH|DIRECT|NOATIME|LARGEFILE|RSYNC)"
    r"|fdatasync|[gs]etres[ug]id|getrandom|GRND_\w+|unshare|setns|CLONE_\w+|RTLD_DEEPBIND",
    select: r"e?poll_?create\w*|epoll|EPOLL\w+",
    signal: r"SIGRTM\w+|SIGPWR|SIGSTKFLT|SIGPOLL|SIGCLD|sigwaitinfo|sigtimedwait|pidfd_\w+",
    resource: r"prlimit|RLIMIT_(MSGQUEUE|NICE|OFILE|RTPRIO|RTTIME|SIGPENDING)|RUSAGE_THREAD",
    fcntl: r"F_(SETPIPE|GETPIPE|ADD_SEALS|GET_SEALS|SEAL|NOTIFY|SETLEASE|GETLEASE|OFD)\w*",
    mmap: r"MAP_(POPULATE|STACK|DENYWRITE|EXECUTABLE)",
    socket: r"SO_(PEERCRED|PASSCRED|BINDTODEVICE)|AF_(NETLINK|VSOCK|PACKET|ALG)",
}
_BEFORE = (
    "asyncio",
    "ctypes.util",
    "multiprocessing.forkserver",
    "shutil",
    "subprocess",
    "urllib.request",
    "uuid",
)
"""Modules of the standard library that are made for the system on which they are imported."""
_TORCH = ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor")
_LACKING = "prctl"
"""Function of the C library that macOS does not have."""


def be_elsewhere() -> None:
    """Take away from this process what macOS does not have."""
    tempfile._O_TMPFILE_WORKS = False  # type: ignore[attr-defined]
    sys.platform = "darwin"
    for module, pattern in _ABSENT.items():
        for name in [name for name in vars(module) if re.fullmatch(pattern, name)]:
            delattr(module, name)
    for function in ("open", "stat", "lstat", "listdir", "scandir", "readlink", "access"):
        _hide_in(os, function)
    _hide_in(builtins, "open")
    of_library = ctypes.CDLL.__getattr__

    def lacking(library: ctypes.CDLL, name: str) -> Any:
        # What forks the programs of tests goes on as before.
        if name == _LACKING and "/packages/" in sys._getframe(1).f_code.co_filename:
            raise AttributeError(f"symbol not found: {name}")
        return of_library(library, name)

    ctypes.CDLL.__getattr__ = lacking  # type: ignore[method-assign]


def _hide_in(module: ModuleType, name: str) -> None:
    real = getattr(module, name)

    def without(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        shown = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
        if isinstance(shown, str) and _HIDDEN.match(shown):
            raise FileNotFoundError(2, "No such file or directory", shown)
        return real(path, *arguments, **options)

    setattr(module, name, without)


def modules_of(package: str) -> list[str]:
    """Return the names of all modules of a package but those that run as they are imported."""
    found = importlib.import_module(package)
    names = [m.name for m in pkgutil.walk_packages(found.__path__, f"{package}.")]
    return [
        package,
        *(n for n in names if n.rpartition(".")[2] not in ("__main__", "sitecustomize")),
    ]


def loads(name: str) -> bool:
    """Import a module; return False where it is for a library of others that is not here."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("hp_"):
            raise
        return False
    return True


def main(program: str, *arguments: str) -> NoReturn:
    """Import all modules of packages (`import NAME ...`), or call `main` of one."""
    for name in _BEFORE if program == "hp_schedule.cli" else (*_BEFORE, *_TORCH):
        importlib.import_module(name)
    be_elsewhere()
    if program == "import":
        loaded = sum(map(loads, [name for p in arguments for name in modules_of(p)]))
        sys.stdout.write(f"{loaded} modules\n")
        sys.exit(0)
    sys.argv = [program, *arguments]
    sys.exit(importlib.import_module(program).main())


if __name__ == "__main__":
    main(*sys.argv[1:])
