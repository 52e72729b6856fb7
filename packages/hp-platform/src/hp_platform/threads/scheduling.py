"""How threads of ranks take cores from each other where there are fewer cores than threads.

Note [No core by waking up]. A thread of Gloo's waits for messages. The system lets a thread that
wakes up take the core of one that runs, here of the one that is still sending and holds the lock of
the connection. Gloo's thread cannot have that lock and asks for the same events again, without a
pause, until its slice of time ends: 11 million calls of `epoll_wait` in 1,000 all-reduces of four
ranks on two cores. Under `SCHED_BATCH` threads have the same shares of the cores and wait for one
until it is free: 0.1 million calls, and a small all-reduce takes 1.8 in place of 6.7 ms
(benchmarks/bench_scheduling.py; calls by `perf stat -a -e syscalls:sys_enter_epoll_wait`).
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def schedule_as_batch() -> None:
    """Let no thread of this process take a core from another by waking up, on Linux.

    Threads that they start have it from them, so call this before process groups are made. Threads
    that have been given a policy by somebody else keep it, and all do where the system allows no
    other. See Note [No core by waking up].
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for task in Path("/proc/self/task").glob("*"):
        thread = int(task.name)
        with suppress(OSError):  # a sandbox, or a thread that has ended meanwhile
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
