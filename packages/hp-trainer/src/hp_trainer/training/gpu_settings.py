"""Variables that CUDA, NCCL and torch's allocator read, set where that is right.

Nothing that the user has set is changed. All of it is read once, when a process first uses the GPU.

A kernel of NCCL waits on the device for those of other ranks. NCCL asks that kernels of several
communicators start in one order everywhere, and sees to it if it is asked: each starts after the
one that the host launched before it has started (NVIDIA's guide, "Using multiple NCCL communicators
concurrently"). That needs a host order without a cycle over the ranks, and one thread at a time
that launches. `hp_schedule.validate` proves the order for every schedule that `add_send_recv` has
completed, even where each message held up its rank until the other side is there, early receives
and collectives inside compute steps included. Stages of different sizes, and chains that come back
to the first ranks, launch from a second thread: there it is not set. Before CUDA 12.3 NCCL keeps
the order by letting each kernel end first, which undoes all overlap.

CUDA loads a kernel's module when it is launched first, which waits for what the device was given
and keeps other threads from launching. Where one thread launches, it is one more wait of the host,
which the proof of the order allows. Where a second thread sends, a receive may wait on the device
for what that thread is kept from sending. There torch's modules are loaded before all else
(`CUDA_MODULE_LOADING`, which takes time and memory of the device), and those of Triton while the
first run goes through the hosts (Note [By host] of hp-vtp).
"""

import ctypes
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from hp_trainer.config import Config
from hp_trainer.layout.ranks import Layout
from hp_trainer.layout.schedules import KINDS

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
_REGISTERING = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
_ORDERED_SINCE_NCCL, _OVERLAPS_SINCE_CUDA = (2, 26), (12, 3)
_LOADING, _EAGER = "CUDA_MODULE_LOADING", "EAGER"


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


def settings(config: Config, env: Mapping[str, str], versions: Versions) -> dict[str, str]:
    """Return what to add to the environment of a rank that uses a GPU.

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


def apply(config: Config, env: MutableMapping[str, str]) -> None:
    """Set what this process needs, if it is to use a GPU and has not begun to.

    Args:
        config: Config of the run.
        env: Environment of this process, to which settings are added.
    """
    uses = config.launch.device != "cpu" and torch.cuda.is_available()
    if uses and torch.version.cuda is not None and not torch.cuda.is_initialized():
        env.update(settings(config, env, installed()))


def installed() -> Versions:
    """Look at torch, NCCL and the driver, without a use of the GPU."""
    nccl = torch.cuda.nccl.version()[:2] if dist.is_nccl_available() else (0, 0)
    major, _, rest = (torch.version.cuda or "0.0").partition(".")
    return Versions(nccl, (int(major), int(rest.partition(".")[0])), _driver())


def in_force(env: Mapping[str, str]) -> list[str]:
    """Return what is set, whoever has set it, as `NAME=value`."""
    return [f"{k}={env[k]}" for k in (*_ALLOCATOR, _CONNECTIONS, _ORDER, _LOADING) if k in env]


def in_run(env: Mapping[str, str], config: Config) -> dict[str, str]:
    """Return an environment with what a run adds on a machine of which no version is too old."""
    newest = Versions(_ORDERED_SINCE_NCCL, _OVERLAPS_SINCE_CUDA, _OVERLAPS_SINCE_CUDA)
    return {**env, **settings(config, env, newest)}


def launches_from_one_thread(config: Config) -> bool:
    """Say if messages between stages are the runtime's own, and not those of hp-vtp's threads."""
    even = Layout.of(config.mesh).is_even
    return config.mesh.pp == 1 or (even and not KINDS[config.pipeline.schedule].returns)


def _driver() -> tuple[int, int]:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, 0
    version = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return 0, 0
    return version.value // 1000, version.value % 1000 // 10
