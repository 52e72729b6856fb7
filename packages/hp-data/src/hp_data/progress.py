"""Progress of work, told in a line every few seconds."""

import time
from collections.abc import Callable

_EVERY_SECONDS = 5.0


class Progress:
    """Counts bytes of text that were tokenised.

    Args:
        total: Bytes of all the text.
        tell: Prints a line.
        clock: Tells the time in seconds.
    """

    def __init__(
        self,
        total: int,
        tell: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._tell, self._clock = total, tell, clock
        self._done = 0
        self._began = self._told = clock()

    def add(self, nbytes: int) -> None:
        """Count bytes that are done, and tell so if nothing was told for a while."""
        self._done += nbytes
        now = self._clock()
        if now - self._told < _EVERY_SECONDS:
            return
        self._told = now
        rate = self._done / (now - self._began)
        left = (self._total - self._done) / rate
        self._tell(
            f"tokenised {self._done / 1e6:.0f} of {self._total / 1e6:.0f} MB, "
            f"{rate / 1e6:.2f} MB/s, {_duration(left)} left"
        )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
