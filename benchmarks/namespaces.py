"""Network namespaces: machines of their own for ranks, with cables between, on one machine.

For bench_vtp_links.py and integration_tests/reliability/test_two_nodes.py. Needs root, Linux and
the program `ip` (iproute2). Nothing of the machine's own network is touched. As a program, this
runs a module in a namespace that is there: `namespaces.py SPACE MODULE ARGUMENTS`.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET, which `os` has from Python 3.12 on


def ip(*arguments: str) -> str:
    """Run `ip` and return what it prints."""
    done = subprocess.run(["ip", *arguments], check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603, S607 (needs root anyway)
    return done.stdout


def inside(space: str, *arguments: str) -> list[str]:
    """Return the command that runs another one in a namespace."""
    return ["ip", "netns", "exec", space, *arguments]


@contextmanager
def namespaces(names: Sequence[str]) -> Iterator[None]:
    """Have namespaces that reach nothing but themselves; their processes end with them."""
    with ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(remove, name)
            ip("-n", name, "link", "set", "lo", "up")
        yield


def connect(space: str, device: str, *, to: str, end: str) -> None:
    """Lay a cable from a device of one namespace to a device of another, both made by this."""
    ip("-n", space, "link", "add", device, "type", "veth", "peer", "name", end, "netns", to)


def switch_on(space: str, device: str, *, address: str) -> None:
    """Give a device an address with its subnet (10.9.0.1/24) and let it carry messages."""
    ip("-n", space, "addr", "add", address, "dev", device)
    ip("-n", space, "link", "set", device, "up")


def remove_all(prefix: str) -> None:
    """Remove namespaces by the beginning of their names: what a killed run left."""
    for line in ip("netns", "list").splitlines():
        if line.startswith(prefix):
            remove(line.split()[0])


def remove(name: str) -> None:
    """Kill every process of a namespace until there is none, and remove it."""
    while pids := ip("netns", "pids", name).split():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)
    ip("netns", "del", name)


def _enter(name: str) -> None:
    """Let this process, and all that it starts, see the network of a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", name).open("rb") as space:
        if libc.setns(space.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)


if __name__ == "__main__":
    name, module = sys.argv[1:3]
    _enter(name)
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
