"""Python programs as forks of a process that has imported what they need, for tests.

A command of `hp` imports torch for 4 s, and so do the server that its ranks are forked from, each
rank that torchrun starts and each program of the acceptance kit. Such programs can be forked from a
server instead:

    with server(), commands():
        subprocess.run([sys.executable, "-m", "hp_train", "train"])

Tests themselves, and ranks that they run, share those imports: `forked.py -m pytest ...`.

For the caller each is a child as usual, with the session, folder, environment, descriptors and
signals that it would have. It has no seed of hashes of its own, what a library reads from the
environment as it is imported has been read, and nobody sees that an import is missing: what depends
on those is tested without.

A server can only fork children of its own. So it forks one that forks another and ends; the orphan
goes to the next ancestor that asks for orphans, and while it waits, the caller does. For that the
server must be its child: each program has one, forked before it begins and has threads.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest.mock import patch

# What programs import, but not what is run as one (`-m`), of which there would be two.
_IMPORTED = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.launcher.api",
    "torch.distributed.tensor",
    "hp_trainer.launch.launcher",
    "hp_trainer.launch.worker",
    "hp_trainer.training.train",
    "hp_train.verify.command",
    "hp_train.verify.rank",
)
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DEFAULTS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
_SET_SUBREAPER, _GET_SUBREAPER = 36, 37
_LENGTH_BYTES = 8
_TITLE_BYTES = 8192
_MOST_DESCRIPTORS = 64


@dataclass(frozen=True, kw_only=True)
class _Program:
    """A program and what a new process has of its caller.

    Attributes:
        kind: `"-m"`, `"-c"`, or `""` for a file.
        name: Module, code or path.
        arguments: Arguments of the program.
        has_folder: Whether modules are looked for beside the program first (not with `-P`).
        is_unbuffered: Whether it prints at once (`-u`).
        folder: Working directory.
        env: Whole environment.
        leads_session: Whether it leads a session of its own.
        blocked: Signals that are blocked.
        descriptors: Numbers that file descriptors have which are sent along.
    """

    kind: str
    name: str
    arguments: Sequence[str]
    has_folder: bool
    is_unbuffered: bool
    folder: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    leads_session: bool = False
    blocked: Sequence[int] = ()
    descriptors: Sequence[int] = ()

    @property
    def is_fork_server(self) -> bool:
        """Whether it is the server that multiprocessing forks from; it starts no programs."""
        return self.kind == "-c" and self.name.startswith("from multiprocessing.forkserver import")


def _program_of(command: Sequence[str]) -> _Program | None:
    """Read a command; None: it is none of this Python, or one with flags that matter."""
    if not command or command[0] != sys.executable:
        return None
    rest = list(command[1:])
    flags = set()
    while rest and rest[0] in ("-B", "-P", "-u"):
        flags.add(rest.pop(0))
    kind = rest.pop(0) if rest and rest[0] in ("-m", "-c") else ""
    if not rest or (not kind and rest[0].startswith("-")):
        return None
    return _Program(
        kind=kind,
        name=rest[0],
        arguments=rest[1:],
        has_folder="-P" not in flags,
        is_unbuffered="-u" in flags,
    )


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    """Return what an interpreter, its threads and its allocator read as they start."""
    later = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED")
    names = ("PYTHON", "OMP_", "GLIBC_")
    return {k: v for k, v in env.items() if k.startswith(names) and k not in later}


class _Server:
    """A server, seen from its parent, whose children the programs become.

    Args:
        control: Connection to it; it ends when this is closed.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control, self._lock, self._owner = control, threading.Lock(), os.getpid()
        self.read = _read_at_start(os.environ)

    @property
    def is_ours(self) -> bool:
        """Whether it is a child of this process, and not of one that has forked this."""
        return self._owner == os.getpid()

    def suits(self, env: Mapping[str, str]) -> bool:
        """Whether a process of its own would read the same from the environment at its start."""
        return _read_at_start(env) == self.read

    def fork(
        self, program: _Program, descriptors: Sequence[int], *, as_numbers: Sequence[int]
    ) -> int:
        """Start a program that has some descriptors as those numbers; return its process id."""
        program = replace(program, blocked=_blocked(), descriptors=list(as_numbers))
        message = json.dumps(asdict(program)).encode()
        libc, before = ctypes.CDLL(None), ctypes.c_int()
        with self._lock:
            libc.prctl(_GET_SUBREAPER, ctypes.byref(before), 0, 0, 0)
            libc.prctl(_SET_SUBREAPER, 1, 0, 0, 0)
            try:
                length = len(message).to_bytes(_LENGTH_BYTES)
                socket.send_fds(self._control, [length], list(descriptors))
                self._control.sendall(message)
                return int.from_bytes(_read(self._control, _LENGTH_BYTES))
            finally:
                libc.prctl(_SET_SUBREAPER, before.value, 0, 0, 0)


def _blocked() -> list[int]:
    return [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]


_server: _Server | None = None
_popen, _spawn = subprocess.Popen, multiprocessing.util.spawnv_passfds


def _server_of_this() -> _Server | None:
    """Return the server of this process; None: it was forked by itself and has none."""
    return _server if _server is not None and _server.is_ours else None


class Popen(subprocess.Popen[Any]):
    """Forks what is a Python program and needs nothing unusual; starts all else as usual."""

    def _execute_child(self, *given: Any) -> None:
        args, executable, preexec_fn, _, pass_fds, cwd, env, _, _, shell = given[:10]
        pipes, (_, *identity, leads_session, group) = given[10:16], given[16:]
        command = [] if isinstance(args, str | bytes) else list(map(os.fspath, args))
        server, program = _server_of_this(), _program_of(command)
        env = dict(os.environ if env is None else env)
        unusual = executable or preexec_fn or pass_fds or shell
        unusual = unusual or [*identity, group] != _NO_OTHER
        if server is None or program is None or unusual or not server.suits(env):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        theirs = zip((pipes[0], pipes[3], pipes[5]), range(3), strict=True)
        kept = [own if number == -1 else number for number, own in theirs]
        program = replace(
            program,
            folder=os.path.abspath(os.fspath(cwd or ".")),  # noqa: PTH100
            env=env,
            leads_session=bool(leads_session),
        )
        self.pid = server.fork(program, kept, as_numbers=range(3))
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


_NO_OTHER = [None, None, None, -1, -1]
"""Of a process that has the user, groups, umask and process group of its parent."""


def _spawn_or_fork(path: Any, command: Sequence[Any], descriptors: Sequence[int]) -> int:
    """Take the place of what starts multiprocessing's servers, of which one imports torch."""
    program = _program_of([os.fsdecode(argument) for argument in command])
    server = _server_of_this()
    if server is None or program is None or not program.is_fork_server:
        return _spawn(path, command, descriptors)
    program = replace(program, folder=str(Path.cwd()), env=dict(os.environ))
    kept = [0, 1, 2, *descriptors]
    return server.fork(program, kept, as_numbers=kept)


@contextlib.contextmanager
def server() -> Iterator[None]:
    """Have a server, which `commands` needs: that of this process, or one with its own Python."""
    global _server  # noqa: PLW0603 - a process has one
    if _server_of_this() is not None:
        yield
        return
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            number = str(theirs.fileno())
            command = [sys.executable, __file__, "--serve", number, " " * _TITLE_BYTES]
            null = subprocess.DEVNULL
            process = _popen(command, stdin=null, stdout=null, pass_fds=[theirs.fileno()])
        _server = _Server(ours)
        try:
            yield
        finally:
            _server = None
    process.wait()


@contextlib.contextmanager
def commands() -> Iterator[None]:
    """Fork the Python programs that this process starts meanwhile, by anything in `subprocess`.

    Raises:
        RuntimeError: There is no server, or none would be forked, since this process has changed
            what an interpreter reads at its start.
    """
    server = _server_of_this()
    if server is None or not server.suits(os.environ):
        read = None if server is None else _read_at_start(os.environ).items() ^ server.read.items()
        raise RuntimeError(f"no program would be forked, its server does not suit: {read}")
    with patch.object(subprocess, "Popen", Popen):
        yield


def _main(arguments: Sequence[str]) -> None:
    """Import, then be a program and fork others; what is forked goes on here as well."""
    # For all, as tests have it: threads that wait for each other on busy cores take long.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    subprocess.Popen = Popen  # type: ignore[misc]
    multiprocessing.util.spawnv_passfds = _spawn_or_fork  # type: ignore[assignment]
    gc.disable()  # what is imported stays: to look through it is a fifth of the time
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):  # a program that needs it will say so
            importlib.import_module(name)
    gc.enable()
    gc.freeze()  # or every program would take a second at its end to look through all of it
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    installed = [path for path in sys.path[1:] if path not in given]
    # A request to stop reaches all of a group; programs get back what was there, but for what a
    # shell ignores for all that it puts in the background: tests would not have that either.
    usual = {number: signal.signal(number, signal.SIG_IGN) for number in _STOPS}
    usual = {n: _DEFAULTS[n] if was is signal.SIG_IGN else was for n, was in usual.items()}
    own = _program_of([sys.executable, *arguments])
    if own is None:
        program, descriptors = _next(*_serve(socket.socket(fileno=int(arguments[1]))))
    else:
        here = replace(own, folder=str(Path.cwd()), env=dict(os.environ), blocked=_blocked())
        program, descriptors = _next(here, [])
        if program is here:  # whoever asks for `commands` gets them
            subprocess.Popen = _popen  # type: ignore[misc]
    signal.pthread_sigmask(signal.SIG_SETMASK, program.blocked)
    for number, handler in usual.items():
        signal.signal(number, handler)
    _take(descriptors, program.descriptors)
    os.chdir(program.folder)
    os.environ.clear()
    os.environ.update(program.env)
    _entitle(program)
    status = 0
    try:
        _run(program, installed)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        status = end.code or 0
    _end(status)


def _next(program: _Program, descriptors: list[int]) -> tuple[_Program, list[int]]:
    """Fork a server of the program, and return; there, return with every program it forks."""
    global _server  # noqa: PLW0603
    while True:
        if program.leads_session:
            os.setsid()
        if program.is_fork_server:
            return program, descriptors
        ours, control = socket.socketpair()
        if os.fork():
            control.close()
            atexit.register(ours.close)
            _server = _Server(ours)
            return program, descriptors
        ours.close()
        for descriptor in descriptors:
            os.close(descriptor)
        program, descriptors = _serve(control)


def _serve(control: socket.socket) -> tuple[_Program, list[int]]:
    """Fork a process for every request until nobody can ask any more; return in each of them."""
    while True:
        length, descriptors, _, _ = socket.recv_fds(control, _LENGTH_BYTES, _MOST_DESCRIPTORS)
        if not length:
            os._exit(0)
        message = _read(control, int.from_bytes(length))
        ours, theirs = os.pipe()
        between = os.fork()
        if between == 0:
            parent = os.getpid()
            pid = os.fork()
            if pid:
                os.write(theirs, pid.to_bytes(_LENGTH_BYTES))
                os._exit(0)
            os.close(ours)
            os.close(theirs)
            control.close()
            while os.getppid() == parent:
                time.sleep(0.0005)
            return _Program(**json.loads(message)), descriptors
        for descriptor in (theirs, *descriptors):
            os.close(descriptor)
        child = os.read(ours, _LENGTH_BYTES)
        os.close(ours)
        os.waitpid(between, 0)
        control.sendall(child)


def _read(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = connection.recv(count - len(found))
        if not part:
            raise EOFError("the server that programs are forked from has ended")
        found += part
    return found


def _take(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors other numbers, which may be among those that they have."""
    above = max(numbers, default=0) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _entitle(program: _Program) -> None:
    """Have the command stand in /proc, in place of the arguments of the server."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    command = "\0".join([sys.executable, program.kind, program.name, *program.arguments])
    size = end - start
    ctypes.memmove(start, command.encode()[: size - 1].ljust(size, b"\0"), size)


def _run(program: _Program, installed: Sequence[str]) -> None:
    """Run a program as `python` would."""
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = {"-m": program.folder, "-c": "", "": str(Path(program.name).resolve().parent)}
    sys.path[:] = [*given, *installed]
    _customize()
    if program.has_folder and not program.env.get("PYTHONSAFEPATH"):
        sys.path.insert(0, first[program.kind])
    sys.argv[:] = ["-c" if program.kind == "-c" else program.name, *program.arguments]
    if program.is_unbuffered or os.environ.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if program.kind == "-m":
        runpy.run_module(program.name, run_name="__main__", alter_sys=True)
    elif program.kind == "-c":
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(program.name, "<string>", "exec"), main.__dict__)  # noqa: S102
    else:
        runpy.run_path(program.name, run_name="__main__")


def _customize() -> None:
    """Run the `sitecustomize` of a program, unless it is the one that the server has run."""
    spec, known = PathFinder.find_spec("sitecustomize"), sys.modules.get("sitecustomize")
    if spec is None or spec.loader is None:
        return
    if known is not None and known.__spec__ is not None and known.__spec__.origin == spec.origin:
        return
    module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _end(status: int) -> NoReturn:
    """End as an interpreter would, but leave its memory to the system.

    To free object by object what is shared with the server is to copy it first: 0.3 s for a program
    that does nothing, 1 s for a rank.
    """
    threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001 - as multiprocessing does
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined] # noqa: SLF001
        # Operators of torch, hundreds of them, would be taken apart one by one.
        if finalizer.peek()[1].__module__ == "torch.library":
            finalizer.atexit = False
    atexit._run_exitfuncs()  # noqa: SLF001
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    sys.modules["forked"] = sys.modules["__main__"]  # for programs that ask for this server
    _main(sys.argv[1:])
