"""The start of a run: ranks meet, and one of each node prepares the data while the others wait.

One process of a node tokenises, for hours perhaps, and the others have nothing to do. All ranks
meet every few seconds: so no wait is longer than a time-out allows, and a rank that hangs, fails or
is asked to stop ends the wait of all.
"""

import os
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hp_base.command_line import say
from hp_base.environment import external_world
from hp_base.errors import DataError, HangError, told
from hp_data import Tokenizer, load_tokenizer
from hp_data.cache import Cache
from hp_data.preparation import prepare
from hp_platform import Runtime, all_gather_json, initialize, new_group
from hp_platform.failures.messages import agreeing
from hp_trainer.config import Config
from hp_trainer.config.timeouts import Timeouts
from hp_trainer.launch.task import Worker
from hp_trainer.training import gpu_settings

_EVERY_SECONDS = 5.0


class Stopped(Exception):  # noqa: N818 - it is no error
    """The run was asked to stop before there was anything to save."""


class Interrupted(Exception):  # noqa: N818 - it is no error of this rank
    """Work ends since another rank has failed, or all were asked to stop."""


class _State(NamedTuple):
    """The state of a rank, as the others hear of it."""

    works: bool
    has_failed: bool
    is_to_stop: bool


class Waiting:
    """A phase in which some ranks work and the others wait for them. All ranks construct it.

    Args:
        worker: This process.
        phase: What is done, for heartbeats.
        works: Whether this rank works.
        group: Group over all ranks for objects.
        timeout: Seconds that the group waits for a rank.
    """

    def __init__(
        self, worker: Worker, phase: str, *, works: bool, group: ProcessGroup | None, timeout: float
    ) -> None:
        self._worker, self._phase, self._works, self._group = worker, phase, works, group
        self._every = min(_EVERY_SECONDS, timeout / 4)
        self._met_at = time.monotonic()
        self._is_over = False
        self.stopped = False
        self._beat()

    def progress(self) -> None:
        """Say that this rank works on.

        Raises:
            Interrupted: When it is to end.
        """
        self._beat()
        if time.monotonic() - self._met_at >= self._every and self._meet(works=True):
            raise Interrupted

    def finish(self, *, has_failed: bool = False) -> None:
        """Wait for all that work, unless one of them fails or all are to stop."""
        while not self._is_over:
            self._meet(works=False, has_failed=has_failed)

    def _meet(self, *, works: bool, has_failed: bool = False) -> bool:
        """Gather the states of all ranks; returns whether the phase is over."""
        mine = _State(works, has_failed, self._worker.stop.requested)
        states = all_gather_json(mine, of=_State, group=self._group)
        self._met_at = time.monotonic()
        self._beat()
        is_at_work = any(state.works for state in states)
        self.stopped = is_at_work and any(state.is_to_stop for state in states)
        self._is_over = not is_at_work or self.stopped or any(state.has_failed for state in states)
        return self._is_over

    def _beat(self) -> None:
        self._worker.heartbeats.beat(step=0, phase=self._phase, waiting=not self._works)


def connect(config: Config, worker: Worker) -> Runtime:
    """Initialise the world; what comes after waits for as long as a step may.

    Args:
        config: Validated; the same on every rank.
        worker: This process.

    Raises:
        HangError: When ranks that others have started do not meet.
    """
    worker.heartbeats.beat(step=0, phase="connect", waiting=True)
    gpu_settings.apply(config, os.environ)
    launch, timeouts = config.launch, Timeouts.of(config)
    try:
        runtime = initialize(
            worker.info,
            device_type=launch.device,
            timeout=timedelta(seconds=timeouts.init),
            backend=launch.backend,
        )
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        world = external_world()
        place = ":".join(os.environ.get(f"MASTER_{part}", "") for part in ("ADDR", "PORT"))
        raise HangError(
            f"ranks did not meet at MASTER_ADDR:MASTER_PORT ({place}) within {timeouts.init:g} s: "
            f"{told(error, 200)}{world.remedy if world else ''}"
        ) from None
    control = new_group(
        [range(runtime.info.world_size)],
        name="control",
        backend="gloo",
        timeout=timedelta(seconds=timeouts.step),
    )
    assert control is not None, "every rank is in the control group"
    return replace(runtime, control=control)


def prepare_data(config: Config, worker: Worker, runtime: Runtime) -> Tokenizer:
    """Make tokens once per node; every rank learns of a failure before anything is built on it.

    Args:
        config: Validated; the same on every rank.
        worker: This process.
        runtime: The initialised world.

    Returns:
        The tokenizer of the data.

    Raises:
        Stopped: On every rank, when one was asked to stop meanwhile.
    """
    waiting = Waiting(
        worker,
        "prepare data",
        works=worker.info.local_rank == 0,
        group=runtime.control,
        timeout=Timeouts.of(config).step,
    )
    with agreeing(group=runtime.control, where="prepare data"):
        has_failed = True
        try:
            tokenizer = load_tokenizer(config.data.tokenizer, config.data.separator)
            with suppress(Interrupted):
                _make_tokens(config, worker, tokenizer, waiting)
            has_failed = False
        finally:
            waiting.finish(has_failed=has_failed)
    if waiting.stopped:
        if worker.info.rank == 0:
            say("stopped while text was tokenised: what was done is not kept, a resume begins anew")
        raise Stopped
    return tokenizer


def _make_tokens(config: Config, worker: Worker, tokenizer: Tokenizer, waiting: Waiting) -> None:
    if worker.data is None:
        with worker.folder.sub("data", make=True) as data:
            data.require_files()
    if worker.info.local_rank == 0:
        prepare(
            worker.data_dir,
            paths=config.data.paths,
            tokenizer=tokenizer,
            eval_fraction=config.data.eval_fraction,
            cache=Cache.of_user(limit_bytes=config.data.cache_gib << 30),
            on_progress=waiting.progress,
            tell=say if worker.info.rank == 0 else lambda _: None,
        )


def require_same_data(digests: tuple[str, ...], *, control: dist.ProcessGroup) -> None:
    """Compare what the ranks read: nodes without shared storage each tokenise their own copy.

    Args:
        digests: Digests of this rank's splits.
        control: Group over all ranks for objects.

    Raises:
        DataError: On every rank, when two of them differ.
    """
    everyone = all_gather_json(digests, of=tuple[str, ...], group=control)
    other = next((rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]), None)
    if other is not None:
        raise DataError(f"ranks 0 and {other} must read the same text, but their tokens differ")
