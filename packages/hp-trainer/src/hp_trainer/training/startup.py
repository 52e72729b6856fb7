"""The start of a run: what GPUs read is set, ranks meet, and one of each node prepares the data.

One process of a node tokenises, for hours perhaps, and the others have nothing to do. All ranks
meet every few seconds: so no wait is longer than a time-out allows, and a rank that hangs, fails or
is asked to stop ends the wait of all.
"""

import ctypes
import os
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hp_base.command_line import say
from hp_base.environment import external_world
from hp_base.errors import HangError, told
from hp_data import Tokenizer, load_tokenizer
from hp_data.preparation import Cache, prepare
from hp_platform import Runtime, all_gather_json, initialize, new_group
from hp_platform.failures.messages import agreeing
from hp_trainer.config import Config
from hp_trainer.launch.task import Worker
from hp_trainer.layout.schedules import has_even_edges

_EVERY_SECONDS = 5.0

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
_REGISTERING = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
_ORDERED_SINCE_NCCL, _OVERLAPS_SINCE_CUDA = (2, 26), (12, 3)
_LOADING, _EAGER = "CUDA_MODULE_LOADING", "EAGER"


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
    apply_gpu_settings(config, os.environ)
    launch, timeouts = config.launch, config.timeouts
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
        timeout=config.timeouts.step,
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
            field=config.data.field,
            tokenizer=tokenizer,
            eval_fraction=config.data.eval_fraction,
            cache=Cache.of_user(limit_bytes=config.data.cache_gib << 30),
            on_progress=waiting.progress,
            tell=say if worker.info.rank == 0 else lambda _: None,
        )


class Versions(NamedTuple):
    """Versions of what is installed, as major and minor; (0, 0) where there is none.

    Attributes:
        nccl: NCCL that torch has loaded.
        cuda: CUDA for which torch is built.
        driver: Newest CUDA that the driver can run.
    """

    nccl: tuple[int, int]
    cuda: tuple[int, int]
    driver: tuple[int, int]


def gpu_settings(config: Config, env: Mapping[str, str], versions: Versions) -> dict[str, str]:
    """Return the variables to add to the environment of a rank that uses a GPU.

    CUDA, NCCL and torch's allocator read them once, when a process first uses the GPU. Nothing that
    the user has set is changed.

    A kernel of NCCL waits on the device for those of other ranks. NCCL asks that kernels of several
    communicators start in one order everywhere, and sees to it if it is asked: each starts after
    the one that the host launched before it has started (NVIDIA's guide, "Using multiple NCCL
    communicators concurrently"). That needs a host order without a cycle over the ranks, and one
    thread at a time that launches. `hp_schedule.validate` proves the order for every schedule that
    `add_send_recv` has completed, even where each message held up its rank until the other side is
    there, early receives and collectives inside compute steps included. Stages of different sizes,
    and chains that come back to the first ranks, launch from a second thread: there it is not set.
    Before CUDA 12.3 NCCL keeps the order by letting each kernel end first, which undoes all
    overlap.

    CUDA loads a kernel's module when it is launched first, which waits for what the device was
    given and keeps other threads from launching. Where one thread launches, it is one more wait of
    the host, which the proof of the order allows. Where a second thread sends, a receive may wait
    on the device for what that thread is kept from sending. There torch's modules are loaded before
    all else (`CUDA_MODULE_LOADING`, which takes time and memory of the device), and those of Triton
    while the first run goes through the hosts (Note [By host] of hp-vtp).

    Args:
        config: Config of the run.
        env: Environment of the process, whose values are kept.
        versions: Versions of what is installed.
    """
    found = {}
    is_registering = env.get(_REGISTERING, "0").lower() in ("1", "true", "y", "yes", "t", "on")
    if not any(name in env for name in _ALLOCATOR) and not is_registering:
        # Exchanges of experts differ in size from step to step, which leaves holes in fixed
        # segments. NCCL cannot register segments that grow, which the hook would ask for.
        found[_ALLOCATOR[0]] = "expandable_segments:True"
    # A queue of the device for each stream: in one of the eight that CUDA has by default, a receive
    # behind one that waits would hold up whatever another stream puts behind it.
    found[_CONNECTIONS] = "32"
    newest = min(versions.cuda, versions.driver)
    if not launches_from_one_thread(config):
        found[_LOADING] = _EAGER
    elif versions.nccl >= _ORDERED_SINCE_NCCL and newest >= _OVERLAPS_SINCE_CUDA:
        found[_ORDER] = "1"
    return {name: value for name, value in found.items() if name not in env}


def apply_gpu_settings(config: Config, env: MutableMapping[str, str]) -> None:
    """Set what this process needs, if it is to use a GPU and has not begun to.

    Args:
        config: Config of the run.
        env: Environment of this process, to which settings are added.
    """
    uses = config.launch.device != "cpu" and torch.cuda.is_available()
    if uses and torch.version.cuda is not None and not torch.cuda.is_initialized():
        env.update(gpu_settings(config, env, installed_versions()))


def installed_versions() -> Versions:
    """Look at torch, NCCL and the driver, without a use of the GPU."""
    nccl = torch.cuda.nccl.version()[:2] if dist.is_nccl_available() else (0, 0)
    major, _, rest = (torch.version.cuda or "0.0").partition(".")
    return Versions(nccl, (int(major), int(rest.partition(".")[0])), _driver())


def gpu_settings_in_force(env: Mapping[str, str]) -> list[str]:
    """Return what is set, whoever has set it, as `NAME=value`."""
    return [f"{k}={env[k]}" for k in (*_ALLOCATOR, _CONNECTIONS, _ORDER, _LOADING) if k in env]


def with_gpu_settings(env: Mapping[str, str], config: Config) -> dict[str, str]:
    """Return an environment with what a run adds on a machine of which no version is too old."""
    newest = Versions(_ORDERED_SINCE_NCCL, _OVERLAPS_SINCE_CUDA, _OVERLAPS_SINCE_CUDA)
    return {**env, **gpu_settings(config, env, newest)}


def launches_from_one_thread(config: Config) -> bool:
    """Say if messages between stages are the runtime's own, and not those of hp-vtp's threads."""
    return config.mesh.pp == 1 or has_even_edges(config)


def _driver() -> tuple[int, int]:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, 0
    version = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return 0, 0
    return version.value // 1000, version.value % 1000 // 10
