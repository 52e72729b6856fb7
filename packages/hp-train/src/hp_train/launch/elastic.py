"""Ranks on this machine through torch's elastic launcher.

Importing this takes as long as importing torch; `hp_train.launch.launcher` does so when the server
that ranks are forked from is already under way.
"""

import logging
import os
import threading

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hp_train.launch.task import Task
from hp_train.launch.worker import work

_POLL_SECONDS = 0.2
_TALKATIVE = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")


class ElasticRanks:
    """The ranks of a run, started and joined by an elastic agent in a thread of its own.

    In the main thread the agent would take the stop signals and raise out of what it is doing.

    Attributes:
        exit_codes: Of the first process that ended otherwise; negative: killed by that signal.
        error: Why the agent itself failed.

    Args:
        task: What every rank gets.
        num_processes: Number of ranks.
    """

    def __init__(self, task: Task, *, num_processes: int) -> None:
        self.exit_codes: dict[int, int] = {}
        self.error: Exception | None = None
        self._thread = threading.Thread(
            target=self._run, args=(task, num_processes), name="elastic", daemon=True
        )
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the agent has seen the end of all ranks."""
        return not self._thread.is_alive()

    def join(self, timeout: float) -> None:
        """Wait until `is_done`, for so many seconds at most."""
        self._thread.join(timeout)

    def _run(self, task: Task, num_processes: int) -> None:
        _silence()
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_processes,
            run_id=task.run_dir.name,
            role="rank",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=_POLL_SECONDS,
            start_method="forkserver",
            logs_specs=_Console(),
        )
        try:
            elastic_launch(config, work)(task)
        except ChildFailedError as error:
            self.exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        except Exception as error:  # noqa: BLE001 - the main thread tells it
            self.error = error


class _Console(LogsSpecs):
    """Ranks write to the launcher's own stdout and stderr, and nothing to files."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for env in envs.values():
            env["TORCHELASTIC_ERROR_FILE"] = ""
        return LogsDest(
            stdouts=dict.fromkeys(envs, ""),
            stderrs=dict.fromkeys(envs, ""),
            error_files=dict.fromkeys(envs, os.devnull),
        )

    @property
    def root_log_dir(self) -> str:
        return os.devnull


def _silence() -> None:
    """Leave the last word to the launcher, which knows what happened, unless asked otherwise."""
    if "LOGLEVEL" not in os.environ:
        made = [name for name in logging.root.manager.loggerDict if name.startswith(_TALKATIVE)]
        for name in (*_TALKATIVE, *made):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
