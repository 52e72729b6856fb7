"""A thread that runs jobs one after the other, started at the first and joined at the end."""

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Worker:
    """Runs jobs in the order they come in. Jobs must not raise."""

    def __init__(self, name: str) -> None:
        """Name the thread, which does not run before there is something to do."""
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()  # nothing comes behind the None that ends the thread
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._closed = False

    def submit(self, job: Callable[[], None]) -> None:
        """Add a job.

        Raises:
            RuntimeError: After `close`.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._thread.name}: must be open to take a job")
            if self._thread.ident is None:
                self._thread.start()
            self._jobs.put(job)

    def close(self) -> None:
        """Run the jobs that are left and end the thread; a second call does nothing."""
        with self._lock:
            self._closed = True
            self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        for job in iter(self._jobs.get, None):
            job()
            del job  # not to be kept alive until the next one
