"""Requests to stop, by signals.

One request may send many signals to a run. Ctrl-C goes to every process of the terminal's group;
``timeout`` signals its child and then its whole group; a scheduler may signal every process of a
job. So the launcher passes a request on through shared memory instead of another signal, and all
signals within `ONE_REQUEST_SECONDS` of the first are one request. A later signal is a second
request: to stop at once.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self, TypeAlias

Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | signal.Handlers | None
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
ONE_REQUEST_SECONDS = 0.5


def name_of(number: int) -> str:
    """Return the name of a signal, such as ``SIGKILL``, or ``signal 64`` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ending(status: int) -> str:
    """Describe the end of a program by its exit status; below 0: minus the number of a signal."""
    return f"ended with status {status}" if status >= 0 else f"was killed by {name_of(-status)}"


class StopFlag:
    """A flag that is set when this process, or the whole run, is asked to stop.

    A second request ends the process at once with 128 + the signal's number.

    Args:
        passed_on: Function that tells whether the launcher was asked to stop; None: there is none.
    """

    def __init__(self, passed_on: Callable[[], bool] | None = None) -> None:
        self._passed_on = passed_on
        self._first = 0.0

    @property
    def requested(self) -> bool:
        """Tell whether to stop. Cheap enough to be asked at every step."""
        return self._first > 0 or (self._passed_on is not None and self._passed_on())

    def install(self) -> None:
        """Listen to the stop signals; must be called in the main thread."""
        for signum in _listened_to():
            signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first and now - self._first > ONE_REQUEST_SECONDS:
            os._exit(128 + signum)
        self._first = self._first or now


class StopTrap:
    """The launcher's record of stop signals; a context in which it listens to them.

    Until `is_watched` is set, a second request raises SystemExit in the main thread, for example
    in the middle of an import.

    Attributes:
        first: Number of the first signal; 0: none yet.
        second: Number of the signal that asks to end at once; 0: none yet.
        is_watched: Whether the launcher reads `second` all the time.
    """

    def __init__(self) -> None:
        self.first = 0
        self.second = 0
        self.is_watched = False
        self._asked_at = 0.0
        self._previous: dict[int, Handler] = {}

    @property
    def waiting_seconds(self) -> float:
        """Return the seconds since the first signal; 0 without a signal."""
        return time.monotonic() - self._asked_at if self.first else 0.0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum in _listened_to():
                self._previous[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        if not self.first:
            self.first, self._asked_at = signum, time.monotonic()
        elif self.waiting_seconds > ONE_REQUEST_SECONDS:
            self.second = signum
            if not self.is_watched:
                raise SystemExit(128 + signum)


def ignore_stops() -> None:
    """Ignore stop signals, so that a process whose work is done ends normally."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def _listened_to() -> list[signal.Signals]:
    """Return the stop signals that are not ignored already, as by ``nohup``."""
    return [s for s in STOP_SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
