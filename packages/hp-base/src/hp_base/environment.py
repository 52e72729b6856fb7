"""Variables that torchrun or Slurm put into the environment, read without torch."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from hp_base.errors import ConfigError

_FIRST_SPECIAL_STEP = 2**32 - 16
"""Slurm numbers the batch script and other steps that are no ``srun`` from the top down."""

_REMEDIES = {
    "WORLD_SIZE": "; where no torchrun has started this process: unset RANK WORLD_SIZE",
    "SLURM_NTASKS": "; where no srun has started this process: unset SLURM_PROCID",
}


@dataclass(frozen=True, slots=True)
class World:
    """Processes that somebody else has started.

    Attributes:
        variable: Where the number of processes was read.
        size: Number of processes.
    """

    variable: str
    size: int

    def __str__(self) -> str:
        return f"{self.variable} ({self.size})"

    @property
    def remedy(self) -> str:
        """Remedy where the variables are left over from another job, to end a message."""
        return _REMEDIES[self.variable]


def external_world(env: Mapping[str, str] = os.environ) -> World | None:
    """Return the processes started by torchrun or ``srun``; None where this one is to start them.

    A Slurm batch script is one process, whatever number of tasks its job asked for, and starts
    the others itself; so does the one task of a step, a shell on a node for example.

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
    """Refuse to start processes where somebody else has.

    Args:
        what: What would start them, as the message begins.

    Raises:
        ConfigError: Under torchrun or ``srun``.
    """
    if (world := external_world()) is not None:
        why = f"{what} starts processes of its own: not under torchrun or srun"
        raise ConfigError(why + world.remedy)


def require_meeting_point(env: Mapping[str, str]) -> None:
    """Refuse ranks that are told of each other, but not where they meet.

    Raises:
        ConfigError: Naming the variable, and what to do where it is left over from another job.
    """
    remedy = _REMEDIES["WORLD_SIZE"]
    if not env.get("MASTER_ADDR"):
        raise ConfigError(f"MASTER_ADDR must be set where RANK and WORLD_SIZE are{remedy}")
    port = env.get("MASTER_PORT", "")
    if not (port.isdecimal() and int(port) < 1 << 16):
        raise ConfigError(f'MASTER_PORT ("{port[:60]}") must be the number of a port{remedy}')


def speaks_for_node(env: Mapping[str, str] = os.environ) -> bool:
    """Tell whether this process says what all processes of its machine have to say."""
    try:
        is_alone = external_world(env) is None  # whatever another job has left in the variables
    except ConfigError:
        is_alone = False
    return is_alone or env.get("LOCAL_RANK", env.get("SLURM_LOCALID", "0")) == "0"


def slurm_rendezvous(env: Mapping[str, str]) -> dict[str, str]:
    """Find where the processes of a Slurm step meet: the first host, and a port of the job.

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
