"""Minutes for a comparison, shared out among its runs: which are made, and how far each goes."""

import math
import time
from collections.abc import Iterator
from pathlib import Path

from hp_verify.comparing.recordings import join

_SHARES = {"reference": 1 / 4, "reference-1": 1 / 2, "reference-2": 1 / 2}
"""Part of the time left that a run may take; of all others: all of it."""
_RUNS = 6
"""Times the seconds of a reference that must be left for a second run with other sums: that run, a
job that takes twice as long, and both once more."""


class Budget:
    """Decides how much is looked at within a number of minutes.

    Args:
        minutes: Minutes for all runs; None: as long as each takes.
        seconds: Most seconds of one run.

    Attributes:
        minutes: Minutes for all runs.
        seconds: Name of a run -> seconds that it took; of a reference that was kept, once.
    """

    def __init__(self, minutes: float | None, seconds: float) -> None:
        self.minutes = minutes
        self._end = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self._most = seconds
        self.seconds: dict[str, float] = {}

    @property
    def _left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def limit(self, run: str) -> float:
        """Return the most seconds that a run may take."""
        return min(self._most, self._left * _SHARES.get(run, 1.0))

    def seeds(self) -> Iterator[int]:
        """Yield seeds of runs of the reference with other sums, as long as there is time."""
        yield 1
        if self._left >= _RUNS * self.seconds["reference"]:
            yield 2

    def allows_second_runs(self) -> bool:
        """Tell whether both may run once more, and a program that shows what they tell."""
        return self._left >= 2 * (self.seconds["reference"] + self.seconds["job"])

    def is_enough(self, folder: Path, last: int) -> bool:
        """Tell whether a run may be ended, because each rank has gone past a last step.

        Args:
            folder: Folder of the run's recording.
            last: Last step that is looked at; 0: not known.
        """
        if self.minutes is None or not last:
            return False
        counts = [int(path.read_bytes() or 0) for path in folder.glob("alive-*.count")]
        return min(counts, default=0) > last and join(folder).is_whole(last)
