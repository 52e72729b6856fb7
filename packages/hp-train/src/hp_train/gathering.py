"""The choice of FSDP's gathering, made before ranks start where the config leaves it open.

What `mesh.gather = "auto"` becomes depends on prices and on the GPUs of the machine. The process
that starts the ranks, or under torchrun each process before it becomes a rank, asks the driver for
the GPUs and hp-plan for prices, and puts the word into the config that ranks get and that the run
directory keeps: no rank prices anything. Without GPUs, or where the driver does not tell of them,
it is by stage, which is what a trainer takes "auto" for.
"""

import csv
import os
import shutil
import subprocess
from collections.abc import Mapping
from typing import NamedTuple

from hp_plan.costs.machine import Machine, machine_found
from hp_plan.layouts.command import known_vocab_size
from hp_plan.price.estimate import decided
from hp_trainer.config import Config
from hp_trainer.config.options import Resolved

_SECONDS = 20.0
_QUERY = ("--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")


class VisibleGpu(NamedTuple):
    """A GPU of this machine that the ranks of a run may use.

    Attributes:
        name: Name that the driver gives it.
        memory: Bytes of its memory.
    """

    name: str
    memory: float


def with_gather_decided(resolved: Resolved, env: Mapping[str, str] = os.environ) -> Resolved:
    """Put "stage" or "block" in the place of `mesh.gather = "auto"`, on a machine with GPUs.

    Args:
        resolved: A checked config and where its values come from.
        env: Environment of this process.

    Returns:
        The same where nothing is left open, or nothing is known of GPUs.
    """
    config = resolved.config
    if config.mesh.gather != "auto" or config.launch.device == "cpu":
        return resolved
    gpus = visible_gpus(env)
    if not gpus:
        return resolved
    chosen = decided(config, machine_of(config, gpus, env), vocab_size=known_vocab_size(config))
    origins = {**resolved.origins, "mesh.gather": "decided at start"}
    return Resolved(chosen, origins, resolved.name)


def machine_of(config: Config, gpus: list[VisibleGpu], env: Mapping[str, str]) -> Machine:
    """Return the machine that ranks find, which share GPUs where these are fewer.

    Args:
        config: A checked config.
        gpus: GPUs of this machine, at least one.
        env: Environment; torchrun says in it how many ranks are here.
    """
    local = int(env.get("LOCAL_WORLD_SIZE", "0") or 0) or config.world_size
    sharing = -(-local // len(gpus))
    memory = min(gpu.memory for gpu in gpus) / sharing
    return machine_found(gpus[0].name, memory=memory, node_size=local)


def visible_gpus(env: Mapping[str, str]) -> list[VisibleGpu]:
    """Ask the driver which GPUs this process may use; none where nobody tells.

    torch would make a context on a GPU, which costs seconds and memory.

    Args:
        env: Environment, of which CUDA_VISIBLE_DEVICES counts.
    """
    tool = shutil.which("nvidia-smi", path=env.get("PATH"))
    if tool is None:
        return []
    try:
        found = subprocess.run(  # noqa: S603 - the driver's own program
            [tool, *_QUERY], capture_output=True, text=True, timeout=_SECONDS, check=True
        ).stdout
        rows = [[cell.strip() for cell in row] for row in csv.reader(found.splitlines())]
        gpus = {
            (index, uuid): VisibleGpu(name, float(mib) * 2**20) for index, uuid, name, mib in rows
        }
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    if (visible := env.get("CUDA_VISIBLE_DEVICES")) is None:
        return [*gpus.values()]
    chosen = []
    for word in filter(None, map(str.strip, visible.split(","))):
        here = [
            gpu for (index, uuid), gpu in gpus.items() if word == index or uuid.startswith(word)
        ]
        if len(here) != 1:  # a part of a GPU, or none of these
            return []
        chosen += here
    return chosen
