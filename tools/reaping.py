"""Run Python and wait for what it leaves behind, such as fork servers: `reaping.py -m pytest ...`.

The CPU time of a process that outlives its parent counts for nobody, unless somebody adopts it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from types import FrameType

_PR_SET_CHILD_SUBREAPER = 36
_ORPHAN_SECONDS = 5.0  # to end, after the program


def run(arguments: list[str]) -> int:
    """Run Python with these arguments; return its exit status, 128 and more if a signal ended it.

    Interrupts from a terminal reach the program without help; other requests to stop are passed on.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    program = os.posix_spawn(sys.executable, [sys.executable, *arguments], os.environ)

    def pass_on(signum: int, _: FrameType | None) -> None:
        if signum != signal.SIGINT:
            os.kill(program, signum)

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, pass_on)
    pid = status = 0
    while pid != program:
        pid, status = os.waitpid(-1, 0)
    deadline = time.monotonic() + _ORPHAN_SECONDS
    while time.monotonic() < deadline:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == 0:
            time.sleep(0.02)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
