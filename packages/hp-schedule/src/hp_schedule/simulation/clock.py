"""Time as a queue of events, and cores that ranks may share."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

Action = Callable[[], None]


class Clock:
    """Runs actions in the order of their times; those of one time in the order they were asked for.

    Attributes:
        now: The time of the action that runs, of the last one at the end.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._number = count()

    def at(self, time: float, action: Action) -> None:
        """Run an action later; `time` is not before `now`."""
        heappush(self._events, (time, next(self._number), action))

    def after(self, duration: float, action: Action) -> None:
        """Run an action once `duration` has passed."""
        self.at(self.now + duration, action)

    def run(self) -> None:
        """Run until nothing is left to be done."""
        while self._events:
            self.now, _, action = heappop(self._events)
            action()


class SharedCores:
    """All ranks share a machine, as processes under a fair operating system do.

    While n steps run on c < n cores, each advances at c / n of its full speed. The work done per
    running step is one number for all of them, so that the next to end is the one with the least
    work at its end.

    Args:
        clock: The clock.
        cores: How many steps run at full speed at once, at least 1.
    """

    def __init__(self, clock: Clock, cores: int) -> None:
        self._clock = clock
        self._cores = cores
        self._number = count()
        self._running: list[tuple[float, int, Action]] = []
        self._work = 0.0
        self._seen = 0.0
        self._plan = 0

    def start(self, duration: float, done: Action) -> None:
        """Begin a step that takes `duration` on a core of its own; `done` is called at its end.

        From now on all running steps may be slower.
        """
        self._advance()
        heappush(self._running, (self._work + duration, next(self._number), done))
        self._plan_next()

    def _advance(self) -> None:
        self._work += (self._clock.now - self._seen) * self._speed
        self._seen = self._clock.now

    @property
    def _speed(self) -> float:
        return min(1.0, self._cores / max(1, len(self._running)))

    def _plan_next(self) -> None:
        self._plan += 1
        if self._running:
            plan = self._plan
            left = max(0.0, self._running[0][0] - self._work) / self._speed
            self._clock.after(left, lambda: self._finish(plan))

    def _finish(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        self._work, _, done = heappop(self._running)
        self._plan_next()
        done()
