"""No process of a run outlives the launcher, however it ends."""

import ctypes
import os
import select
import signal
import threading

LAUNCHER_VARIABLE = "HP_TRAIN_LAUNCHER_PID"
"""Environment variable by which the server that ranks are forked from knows that it is one."""

_PR_SET_PDEATHSIG = 1


def die_with(pid: int) -> None:
    """End this process when its parent or the launcher ends, however that comes.

    The kernel sees to the parent, which is torn down with the launcher by the same means. Should
    that chain be broken, a thread waits for the launcher itself.
    """
    kill_when_parent_dies()
    try:
        launcher = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    except OSError:  # a kernel without it; the parent is watched all the same
        return
    threading.Thread(target=_exit_after, args=(launcher,), daemon=True).start()


def kill_when_parent_dies() -> None:
    """Ask the kernel to kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _exit_after(launcher: int) -> None:
    poll = select.poll()
    poll.register(launcher, select.POLLIN)
    poll.poll()
    os._exit(1)
