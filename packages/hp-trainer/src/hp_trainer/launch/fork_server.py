"""Imported first by the server that ranks are forked from; not for import elsewhere.

The server must outlive signals that are meant for the run: a terminal or a scheduler sends them
to every process, and the ranks, which end with the server, could no longer save. It must not
outlive the launcher, which by itself it would: ranks hold open the pipe that tells it of the
launcher's end.

The server collects no garbage. What it imports stays, and to look through it again and again takes
a fifth of the time of importing torch. Ranks turn collection on.
"""

import gc
import os
import signal
from types import FrameType

from hp_base.session import LAUNCHER_VARIABLE, kill_when_parent_dies
from hp_base.signals import STOP_SIGNALS

gc.disable()
_server = os.getpid()
_previous = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}


def _on_interrupt(signum: int, frame: FrameType | None) -> None:
    # multiprocessing gives this handler, and no other, back to what it forks.
    if os.getpid() != _server:
        signal.default_int_handler(signum, frame)


def _restore() -> None:
    for signum, handler in _previous.items():
        signal.signal(signum, handler)


if os.environ.get(LAUNCHER_VARIABLE) == str(os.getppid()):
    kill_when_parent_dies()
    for _signum, _handler in _previous.items():
        if _handler is not signal.SIG_IGN:
            signal.signal(_signum, _on_interrupt if _signum == signal.SIGINT else signal.SIG_IGN)
    os.register_at_fork(after_in_child=_restore)
    # The launcher blocked them until here.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
