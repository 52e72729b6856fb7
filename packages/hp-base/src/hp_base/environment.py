"""Environment variables of torchrun and Slurm, and usable processors, read without torch."""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from hp_base.errors import ConfigError

_FIRST_SPECIAL_STEP = 2**32 - 16
"""First number of Slurm's steps besides ``srun``, such as the batch script."""

_REMEDIES = {
    "WORLD_SIZE": "; where no torchrun has started this process: unset RANK WORLD_SIZE",
    "SLURM_NTASKS": "; where no srun has started this process: unset SLURM_PROCID",
}


@dataclass(frozen=True, slots=True)
class World:
    """The processes of a job that torchrun or ``srun`` has started.

    Attributes:
        variable: Variable with the number of processes.
        size: Number of processes.
    """

    variable: str
    size: int

    def __str__(self) -> str:
        return f"{self.variable} ({self.size})"

    @property
    def remedy(self) -> str:
        """Return the end of a message with a remedy for variables left over from another job."""
        return _REMEDIES[self.variable]


def usable_cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def external_world(env: Mapping[str, str] = os.environ) -> World | None:
    """Return the processes started by torchrun or ``srun``; None where this process starts them.

    A Slurm batch script is one process, whatever number of tasks its job has, and starts the other
    processes itself; so does the only task of a step, such as a shell on a node.

    Raises:
        ConfigError: When the number of processes is not a number.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        variable = "WORLD_SIZE"
    elif "SLURM_PROCID" in env and "SLURM_NTASKS" in env and _is_srun_step(env):
        variable = "SLURM_NTASKS"
    else:
        return None
    if not env[variable].isdecimal():
        given = f'{variable} ("{env[variable][:60]}")'
        raise ConfigError(f"{given} must be a number{_REMEDIES[variable]}")
    world = World(variable, int(env[variable]))
    return None if variable == "SLURM_NTASKS" and world.size == 1 else world


def require_unstarted(what: str) -> None:
    """Check that torchrun or ``srun`` has not started the processes already.

    Args:
        what: Name of the command that would start processes, as the message begins.

    Raises:
        ConfigError: Under torchrun or ``srun``.
    """
    if (world := external_world()) is not None:
        why = f"{what} starts processes of its own: not under torchrun or srun"
        raise ConfigError(why + world.remedy)


def require_meeting_point(env: Mapping[str, str]) -> None:
    """Check that ranks which torchrun's variables announce also have an address to meet at.

    Raises:
        ConfigError: If a variable is missing or wrong; names it, and a remedy.
    """
    remedy = _REMEDIES["WORLD_SIZE"]
    if not env.get("MASTER_ADDR"):
        raise ConfigError(f"MASTER_ADDR must be set where RANK and WORLD_SIZE are{remedy}")
    port = env.get("MASTER_PORT", "")
    if not (port.isdecimal() and int(port) < 1 << 16):
        raise ConfigError(f'MASTER_PORT ("{port[:60]}") must be the number of a port{remedy}')


def speaks_for_node(env: Mapping[str, str] = os.environ) -> bool:
    """Tell whether this process is the one of its machine that prints messages."""
    try:
        is_alone = external_world(env) is None
    except ConfigError:
        is_alone = False
    return is_alone or env.get("LOCAL_RANK", env.get("SLURM_LOCALID", "0")) == "0"


def slurm_rendezvous(env: Mapping[str, str]) -> dict[str, str]:
    """Return the address at which processes of a Slurm step meet: first host, port of the job.

    Returns:
        Values of ``MASTER_ADDR`` and ``MASTER_PORT`` that are not set already.

    >>> slurm_rendezvous({"SLURM_JOB_NODELIST": "gpu[03-07,12],big1", "SLURM_JOB_ID": "17"})
    {'MASTER_ADDR': 'gpu03', 'MASTER_PORT': '20017'}
    """
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    match = re.match(r"([^,\[]*)(?:\[(\w+))?", nodes)
    host = "".join(part or "" for part in match.groups()) if match else ""
    job = env.get("SLURM_JOB_ID", "0")
    port = 20_000 + (int(job) if job.isdecimal() else 0) % 20_000
    found = {"MASTER_ADDR": host or "localhost", "MASTER_PORT": str(port)}
    return {name: value for name, value in found.items() if name not in env}


def _is_srun_step(env: Mapping[str, str]) -> bool:
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    return step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP
