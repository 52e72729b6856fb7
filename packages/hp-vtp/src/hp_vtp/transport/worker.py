"""A thread that runs jobs one after the other, started at the first and joined at the end."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Worker:
    """Runs jobs in the order they come in. Jobs must not raise."""

    def __init__(self, name: str) -> None:
        """Name the thread, which does not run before there is something to do."""
        self._name = name
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, job: Callable[[], None]) -> None:
        """Add a job.

        Raises:
            RuntimeError: After `close`.
        """
        with self._changed:
            if self._closed:
                raise RuntimeError(f"{self._name}: must be open to take a job")
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Run what is left, end the thread and wait for its end; a second call does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._closed:
                    self._changed.wait()
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            job()
            del job  # not to be kept alive until the next one
