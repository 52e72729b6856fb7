"""What the machine is: versions, devices, driver, links. Only what is asked for by name."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist

import hp_train
from hp_platform import backend_for
from integration_tests.acceptance.cases import Place

_PACKAGES = ("triton", "transformers", "torchtitan", "numpy")
_QUERY = "driver_version,power.limit,clocks.max.sm,ecc.mode.current,mig.mode.current"
_ASK_SECONDS = 20.0
_RANKS_OF_ONE_GPU = 4


def place_of(device: str, ranks: int) -> Place:
    """What cases depend on.

    Args:
        device: Kind of devices wanted: `"auto"`, `"cpu"` or `"cuda"`.
        ranks: Most ranks that layouts may have; 0: by the number of GPUs.
    """
    num_gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if num_gpus == 0:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Place(device="cpu", max_ranks=ranks or 2, memory_bytes=memory)
    properties = torch.cuda.get_device_properties(0)
    return Place(
        device="cuda",
        name=properties.name,
        num_gpus=min(num_gpus, ranks) if ranks else num_gpus,
        max_ranks=ranks or max(num_gpus, _RANKS_OF_ONE_GPU),
        shares=backend_for(torch.device("cuda"), ranks_per_device=2) == "nccl",
        capability=(properties.major, properties.minor),
        memory_bytes=properties.total_memory,
        nccl=tuple(torch.cuda.nccl.version()) if dist.is_nccl_available() else (),
    )


def facts() -> dict[str, Any]:
    """Versions and hardware of this machine, for the reader of a result."""
    found: dict[str, Any] = {
        "hp-train": hp_train.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu cores": len(os.sched_getaffinity(0)),
        "memory GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "torch": str(torch.__version__),
        "torch CUDA": torch.version.cuda,
    }
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    if torch.cuda.is_available():
        found |= _gpus()
    return found


def _gpus() -> dict[str, Any]:
    count = torch.cuda.device_count()
    devices = [torch.cuda.get_device_properties(index) for index in range(count)]
    return {
        "GPUs": [
            {
                "name": device.name,
                "memory GiB": round(device.total_memory / 2**30, 1),
                "sm": f"{device.major}.{device.minor}",
                "multiprocessors": device.multi_processor_count,
            }
            for device in devices
        ],
        "peer access": [
            [int(a != b and torch.cuda.can_device_access_peer(a, b)) for b in range(count)]
            for a in range(count)
        ],
        "cuDNN": torch.backends.cudnn.version(),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None,
        "driver": _ask("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv"),
        "topology": _ask("nvidia-smi", "topo", "-m"),
    }


def _commit() -> str:
    """Hash of the commit that the sources are of."""
    folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - no need of a Path
    return _ask("git", "-C", folder, "rev-parse", "HEAD")


def _ask(program: str, *arguments: str) -> str:
    path = shutil.which(program)
    if path is None:
        return ""
    try:
        end = subprocess.run(
            [path, *arguments], capture_output=True, text=True, timeout=_ASK_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return end.stdout.strip() if end.returncode == 0 else ""


def untouched_by_imports() -> bool:
    """Whether what ranks are forked from leaves the GPU alone, so that a fork of it can use it."""
    from hp_trainer.launch import launcher  # noqa: PLC0415 - names what it imports ahead

    modules = launcher.PRELOADED + launcher.PRELOADED_FOR_TRAINING
    command = [sys.executable, "-c", _FORK, *modules]
    end = subprocess.run(command, env=os.environ, check=False)
    return end.returncode == 0


_FORK = """
import importlib, os, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
import torch
assert not torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    os._exit(0 if torch.ones(2, device="cuda").sum().item() == 2 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
