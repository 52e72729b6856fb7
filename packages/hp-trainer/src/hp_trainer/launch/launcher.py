"""From a resolved config to an exit status: the run directory, the ranks, and their end."""

import itertools
import multiprocessing
import os
import signal
import socket
import time
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from hp_base.command_line import say, warn
from hp_base.environment import external_world
from hp_base.errors import (
    PREEMPTED,
    ConfigError,
    HangError,
    MachineError,
    RankLostError,
    RunDirectoryError,
)
from hp_base.folder import Folder
from hp_base.own_caches import short_temporary_folder, why_not_kept
from hp_base.session import LAUNCHER_VARIABLE
from hp_base.signals import STOP_SIGNALS, StopTrap, name_of
from hp_base.streams import endure
from hp_trainer.config import Config
from hp_trainer.config.options import Resolved
from hp_trainer.launch.heartbeats import Heartbeats, State
from hp_trainer.launch.ranks import LOOPBACK, SERVER, Ranks, noticing_server, server_end
from hp_trainer.launch.rundir import (
    CHECKPOINTS,
    finished,
    keep_sources,
    locked,
    make_run_directory,
    open_run_directory,
    say_finished,
    write_config,
)
from hp_trainer.launch.supervise import Verdict, Watch, gone, kill_ranks, most_suspect
from hp_trainer.launch.task import (
    ERRORS,
    HEARTBEAT,
    Task,
    drop_empty,
    error_file,
    read_error,
    stack_file,
)

_NO_GPU = 'launch.device ("cuda") must be cpu or auto where there is no GPU'
# Of NVIDIA's drivers, on boards of its own and under Windows too, and of AMD's.
_GPU_DEVICES = ("nvidia*", "nvhost*", "nvgpu*", "nvmap", "dxg", "kfd")
_ENTRY = "hp_trainer.training.train:main"
_LOOK_SECONDS = 0.2  # twenty times a second took 0.6 % of the CPU time of four ranks
_REAP_SECONDS = 5.0
_LOST = 255  # multiprocessing's answer where nobody has seen how a process ended
_STACK_SECONDS = 1.0
_STACK_LINES = 12
_RESTARTED = (HangError.exit_code, RankLostError.exit_code)
"""What another attempt may get over; a wrong config, bad data and the like it will not."""

# Activations come and go in every step: what C's allocator has, it keeps, instead of having the
# kernel clear pages again. The first number is the largest that every glibc takes. Huge pages saved
# more of a step on one machine and less on another, and made starts seconds longer.
_KEEP_MEMORY = ":".join(
    f"glibc.malloc.{name}" for name in ("mmap_threshold=33554432", "trim_threshold=8589934592")
)
_SERVER_DEFAULTS = {
    "GLIBC_TUNABLES": _KEEP_MEMORY,
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # or a wall of text comes from peers of the dead
    # No file of the current folder is taken for a module: by the server, whose ranks have the path
    # of the launcher, and by what ranks start, as inductor does to try what it has compiled.
    "PYTHONSAFEPATH": "1",
}
"""Variables of the server and of the ranks, where they are not given."""

# torch imports the last three by itself at the first use of an optimizer, of a lazy collective and
# of a checkpoint; every rank would take seconds for each of them, all at the same time.
PRELOADED = ("hp_trainer.launch.fork_server", "hp_trainer.launch.ranks", "hp_trainer.launch.worker")
PRELOADED_FOR_TRAINING = (
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
)


def run(resolved: Resolved, *, _entry: str = _ENTRY) -> int:
    """Train, in this process if torchrun or Slurm started it, else in processes of its own.

    Args:
        resolved: Checked config.
        _entry: ``module:function`` that each rank calls, for tests.

    Returns:
        Exit status, see `hp_base.errors`.

    Raises:
        ConfigError: When the run directory or the device cannot be used.
    """
    if external_world() is not None:
        from hp_trainer.launch import external  # noqa: PLC0415 - imports torch

        return external.run(resolved, entry=_entry)
    endure(tells=False)
    config = resolved.config
    if config.train.compile != "none" and (why := why_not_kept()):
        warn(f"warning: what is compiled is kept for this run alone: {why}")
    with (
        StopTrap() as trap,
        open_run_directory(make_run_directory(resolved)) as folder,
        locked(folder),
    ):
        if done := finished(folder, config):
            return say_finished(folder, config, done)
        keep_sources(folder, resolved)
        write_config(folder, resolved)
        task = Task(config, folder.path, os.getpid(), _entry)
        return _run_ranks(task, folder, trap, resumable=True)


def run_entry(config: Config, run_dir: Path, *, entry: str, data: Path | None = None) -> int:
    """Run a function on the ranks of a config, each a process of its own.

    The first call of a process starts the server that ranks are forked from; later ones, of any
    number of ranks, take half a second. Nothing is printed unless a rank fails. A request to stop
    ends the ranks at once, as there is nothing to save.

    Args:
        config: Checked; every rank gets it.
        run_dir: Exists; for heartbeats, errors and whatever the ranks keep.
        entry: ``module:function`` that each rank calls with the config and ``worker=``.
        data: Where the tokens are; None: in `run_dir`.

    Returns:
        Exit status, see `hp_base.errors`; 128 + the number of the signal that asked to stop.
    """
    with StopTrap() as trap, open_run_directory(run_dir) as folder:
        task = Task(config, run_dir, os.getpid(), entry, data)
        status = _run_ranks(task, folder, trap, resumable=False)
        return 128 + trap.first if trap.first else status


def _run_ranks(task: Task, folder: Folder, trap: StopTrap, *, resumable: bool) -> int:
    """Run the ranks to their end; start them again where a rank is lost or hangs.

    Every start begins with the last good checkpoint.
    """
    in_a_row, newest, most = 0, "", task.config.launch.max_restarts
    while True:
        status = _attempt(task, folder, trap, resumable=resumable)
        if status not in _RESTARTED or trap.first or not resumable:
            return status
        before, newest = newest, _newest_checkpoint(task.run_dir)
        in_a_row = in_a_row + 1 if newest == before else 1
        if in_a_row > most:
            return status
        place = newest or "the beginning"
        warn(f"starting again from {place} ({in_a_row} of {most})")


def _may_have_gpu() -> bool:
    """Say if the system has what a driver of GPUs makes: torch, which knows, takes seconds."""
    return any(next(Path("/dev").glob(name), None) for name in _GPU_DEVICES)


def _newest_checkpoint(run_dir: Path) -> str:
    """Name of the one that ranks look at first; empty: there is none."""
    from hp_checkpoint.runs.directory import complete_checkpoints  # noqa: PLC0415 - imports torch

    return next((path.name for path in complete_checkpoints(run_dir / CHECKPOINTS)), "")


def _attempt(task: Task, folder: Folder, trap: StopTrap, *, resumable: bool) -> int:
    config = task.config
    if config.launch.device == "cuda" and not _may_have_gpu():
        raise ConfigError(_NO_GPU)
    _start_server(task.entry)
    if config.launch.device == "cuda":
        import torch  # noqa: PLC0415 - seconds, while the server does the same

        if not torch.cuda.is_available():
            raise ConfigError(_NO_GPU)
    heartbeats = Heartbeats.create(task.heartbeats, num_ranks=config.world_size)
    trap.is_watched = True
    ranks: Ranks | None = None
    try:
        if trap.first:
            when = "before any process was started, nothing to save"
            return _stopped(task.run_dir, when, resumable)
        ranks = Ranks(task, num_processes=config.world_size)
        watch = Watch(
            heartbeats,
            hang_seconds=config.timeouts.hang,
            start_seconds=config.timeouts.init,
            ended=ranks.ended,
        )
        return _Run(
            folder,
            trap,
            heartbeats,
            ranks,
            watch,
            stop_grace_seconds=config.launch.stop_grace_seconds,
            resumable=resumable,
        ).finish()
    except BaseException:
        if ranks is not None:
            ranks.kill()
        raise
    finally:
        folder.remove(HEARTBEAT)
        drop_empty(folder, map(stack_file, range(config.world_size)))


def _start_server(entry: str) -> None:
    """Start the server that ranks are forked from, which imports all they need once.

    Measured on 2 busy cores: once it is ready, a run of four ranks that have nothing to do takes
    0.5 s from start to end. Four interpreters that import torch each would take 8 s to begin.
    """
    _require_loopback()
    theirs = {n: value for n, value in _SERVER_DEFAULTS.items() if n not in os.environ}
    theirs[LAUNCHER_VARIABLE] = str(os.getpid())
    os.environ.update(theirs)
    module = entry.partition(":")[0]
    needed = PRELOADED_FOR_TRAINING if module.startswith("hp_") else ()
    multiprocessing.set_forkserver_preload([*PRELOADED, module, *needed])
    # What is started here inherits blocked signals: the tracker keeps them blocked, the server
    # unblocks them when it is ready to ignore them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    short_temporary_folder()
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # undone in part by the tracker
        with noticing_server():
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for name in theirs:
            del os.environ[name]


def _require_loopback() -> None:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            # What is not up can be bound to all the same.
            socket.create_connection(server.getsockname(), timeout=_REAP_SECONDS).close()
    except OSError as error:
        what = f"the loopback interface ({LOOPBACK}), over which ranks meet, must be up"
        raise MachineError(f"{what}: {error.strerror}; ip link set {LOOPBACK} up") from None


class _Run:
    """The launcher while its ranks are at work."""

    def __init__(
        self,
        folder: Folder,
        trap: StopTrap,
        heartbeats: Heartbeats,
        ranks: Ranks,
        watch: Watch,
        *,
        stop_grace_seconds: float,
        resumable: bool,
    ) -> None:
        self.folder, self.trap, self.heartbeats, self.ranks = folder, trap, heartbeats, ranks
        self.run_dir = folder.path
        self.watch, self.stop_grace_seconds = watch, stop_grace_seconds
        self.resumable = resumable

    def finish(self) -> int:
        """Watch the ranks to their end, whatever it is, and say what it was.

        Returns:
            Exit status.
        """
        while not self.ranks.is_done:
            self.ranks.join(_LOOK_SECONDS)
            if not self.folder.is_here:
                return self._directory_gone()
            if self.trap.first and not self.resumable:
                return self._end_now()
            if self.trap.first and not self.heartbeats.stop_requested():
                self.heartbeats.request_stop()
                warn("stopping: the ranks save after this step; once more to stop at once")
            if self.trap.second or self.trap.waiting_seconds > self.stop_grace_seconds:
                return self._end_now()
            if self._all_returned():
                # Some library may keep a process from ending whose work is done.
                self.ranks.join(_REAP_SECONDS)
                if not self.ranks.is_done:
                    self._kill()
                break
            verdict = self.watch.look()
            if verdict is not None and not self.ranks.is_done:
                return self._fail(verdict)
        if self._all_returned():
            return self._returned(max(slot.status for slot in self.heartbeats.slots()))
        return self._ended_unseen()

    def _all_returned(self) -> bool:
        return all(slot.state is State.RETURNED for slot in self.heartbeats.slots())

    def _returned(self, status: int) -> int:
        if not self.folder.is_here:
            return self._directory_gone()
        if status == PREEMPTED:
            return _stopped(self.run_dir, resumable=self.resumable)
        if status == 0 and self.resumable:
            say(f"{self.run_dir}")
        return status

    def _end_now(self) -> int:
        slots = self.heartbeats.slots()
        slot = most_suspect([slot for slot in slots if slot.state is State.RUNNING] or slots)
        self._kill()
        if self.trap.second or not self.resumable:
            how = "at once"
        else:
            how = f"by force, not done saving after {self.stop_grace_seconds:g} s"
        resume = f"; from the last checkpoint: hp train --resume {self.run_dir}"
        hint = resume if self.resumable else ""
        warn(f"stopped {how}, rank {slot.rank} was at {slot.place}{hint}")
        return 128 + (self.trap.second or self.trap.first)

    def _directory_gone(self) -> int:
        """Return the verdict that the run directory is gone, so that nothing can be kept."""
        slot = most_suspect(self.heartbeats.slots())
        self._kill()
        warn(f"error: {self.folder.gone} at step {slot.step}")
        return RunDirectoryError.exit_code

    def _fail(self, verdict: Verdict) -> int:
        if not self.folder.is_here:
            return self._directory_gone()
        stack = self._stack_of(verdict.rank) if verdict.is_hang else []
        self._kill()
        reason, message = "", verdict.message
        if verdict.state is State.FAILED:
            reason = next(iter(read_error(self.folder, error_file(verdict.rank))), "").strip()
        elif not verdict.is_hang:
            code = self.ranks.ended().get(verdict.rank)
            if self.trap.first and code == -self.trap.first:
                when = "before the first step, nothing to save"
                return _stopped(self.run_dir, when, self.resumable)
            if code == _LOST and (server := server_end()) is not None:
                place = self.heartbeats.slots()[verdict.rank].place
                message, code = f"{SERVER} was lost at {place}", server
            reason = _describe_exit(code)
        warn(f"error: {message}" + (f": {reason}" if reason else ""))
        if verdict.state is State.FAILED:
            warn(f"traceback: {self.run_dir / ERRORS / error_file(verdict.rank)}")
        for line in stack:
            warn(line)
        return verdict.status

    def _ended_unseen(self) -> int:
        """Return the verdict that all processes have ended, some without a result, unseen."""
        lost = [slot for slot in self.heartbeats.slots() if slot.state is not State.RETURNED]
        codes = self.ranks.ended()
        return self._fail(gone(min(lost, key=lambda slot: codes[slot.rank] == 0)))

    def _kill(self) -> None:
        self.ranks.kill()
        self.ranks.join(_REAP_SECONDS)

    def _stack_of(self, rank: int) -> list[str]:
        """Return the stack of a rank's main thread, which its fault handler writes if blocked."""
        name = stack_file(rank)
        kill_ranks([self.heartbeats.slots()[rank]], signal.SIGUSR2)
        deadline = time.monotonic() + _STACK_SECONDS
        lines: list[str] = []
        while not lines and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            lines = read_error(self.folder, name)
        current = next((n for n, line in enumerate(lines) if line.startswith("Current")), 0)
        # Those above what starts every rank.
        frames = itertools.takewhile(
            lambda line: "hp_trainer/launch/worker.py" not in line, lines[current + 1 :]
        )
        shown = [f"  {line.strip()}" for line in itertools.islice(frames, _STACK_LINES)]
        place = self.run_dir / ERRORS / name
        return [f"its Python stack, from {place}:", *shown] if shown else []


def _stopped(run_dir: Path, when: str = "", resumable: bool = True) -> int:
    when = f" {when}" if when else ""
    hint = f"; go on with: hp train --resume {run_dir}" if resumable else ""
    warn(f"stopped on request{when}{hint}")
    return PREEMPTED


def _describe_exit(code: int | None) -> str:
    if not code:
        return "its process ended without a result"
    if code > 0:
        return f"its process ended with status {code}"
    return f"killed by {name_of(-code)}"
