"""Costs of documents in the stages of a run, on the devices that the run has."""

from collections import Counter
from pathlib import Path

import torch

from hp_packing import StepCosts
from hp_packing.costs_file import read_costs
from hp_packing.learned import learned_costs
from hp_plan.costs.machine import MACHINES, Machine, machine_found
from hp_platform import Runtime, all_gather_json
from hp_trainer.config import Config


def step_costs(config: Config, runtime: Runtime, *, vocab_size: int) -> StepCosts:
    """Return what documents cost the stages where steps are planned. All ranks call this together.

    Args:
        config: Validated; the same on every rank.
        runtime: The initialised world.
        vocab_size: Rows of the embedding.

    Raises:
        ConfigError: When `data.plan_costs` is no file of costs.
    """
    machine = machine_of(runtime) if runtime.device.type == "cuda" else MACHINES["cpu"]
    if config.data.plan_costs:
        return read_costs(Path(config.data.plan_costs), windows=config.model.windows)
    return learned_costs(config, machine, vocab_size=vocab_size)


def machine_of(runtime: Runtime) -> Machine:
    """The GPUs of a run and the memory of the smallest of them. All ranks call this together.

    Args:
        runtime: The initialised world, of CUDA.
    """
    properties = torch.cuda.get_device_properties(runtime.device)
    num_local = runtime.info.local_world_size
    # Several ranks may share a GPU; each may also see but its own.
    most = -(-num_local // torch.cuda.device_count())
    told = (str(properties.uuid), properties.total_memory, num_local, most)
    everyone = all_gather_json(told, of=tuple[str, int, int, int], group=runtime.control)
    sharing = Counter(uuid for uuid, *_ in everyone)
    return machine_found(
        properties.name,
        memory=min(total / min(sharing[uuid], most) for uuid, total, _, most in everyone),
        node_size=max(size for _, _, size, _ in everyone),
    )
