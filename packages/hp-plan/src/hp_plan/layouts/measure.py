"""Measure the rates of this machine with the model that is to be trained.

Processes train a few steps with microbatches of two sizes, from which the rate of products and the
fixed seconds of a layer follow: the size of the config, and a smaller one, as ranks that share a
sequence have. Larger microbatches would leave the caches and hide the fixed seconds. On a CPU there
are two processes, since a core is slower while others compute. They then train layouts whose layers
exchange, from which the latency of an exchange follows: the work of its host, and the wait for the
slower rank. The bandwidth is measured by two processes that compute and exchange messages in turn;
so is the latency if no such layout is allowed.
"""

import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hp_base.beside_tensors import GPU_MARGIN
from hp_base.command_line import scratch
from hp_base.environment import usable_cores
from hp_base.errors import HpError, RunFailedError
from hp_plan.costs.machine import Machine
from hp_plan.costs.memory import static_memory
from hp_plan.costs.modules import whole_model
from hp_plan.price.estimate import Plan
from hp_platform import initialize, launch_all_to_all, new_group, shutdown
from hp_schedule import MetaStepType
from hp_trainer.config import Config, rules
from hp_trainer.config.options import checked_config, one_process, with_keys
from hp_trainer.launch.launcher import run_entry
from hp_trainer.launch.task import Worker
from hp_trainer.layout.ranks import StageLayout
from hp_trainer.training.train import start

_STEPS, _MICROBATCHES, _ROUNDS = 6, 4, 60
_SMALL, _LARGE = 1 << 10, 1 << 22
_FIRST, _LONGEST = 2, 3  # rounds that are not counted
_ATTEMPTS = 4
_RESULT = "measured.json"
_MOST_FIXED = 0.9
"""Maximum share of a microbatch's seconds that are fixed seconds of layers."""
_EXCHANGING: tuple[dict[str, object], ...] = (
    {"mesh.dp_replicate": 2, "mesh.ep": 2},
    {"mesh.tp": 2},
    {"mesh.cp": 2},
)
"""Layouts from which the latency of an exchange follows."""


def measure(config: Config) -> tuple[Machine, str]:
    """Measure the rates of a device of this machine.

    Args:
        config: Config with the model, the dtype and the microbatch size.

    Returns:
        Machine with all devices in one node, and the flags for the same rates without measuring.

    Raises:
        HpError: When a process failed, which the launcher has reported.
    """
    size = config.train.microbatch_size
    sizes = (max(1, size // 4), size) if size > 1 else (1, 2)
    with scratch("hp-plan-") as folder:
        timed = {each: _timed(config, folder, size=each) for each in sizes}
        link = _run(folder, with_keys(_plain(config), {"mesh.dp_replicate": 2}), "time_link")
        machine = machine_of(config, timed, link)
        exchanging = _exchanging(config, size=sizes[1]) if machine.cores > 1 else []
        found = [(layout, _run(folder, layout, "time_model")) for layout in exchanging]
        machine = with_latency(machine, found)
    flags = {
        "flops": machine.flops,
        "memory": machine.memory,
        "memory-bandwidth": machine.memory_bandwidth,
        "layer-seconds": machine.layer_seconds,
        "launch-seconds": machine.launch_seconds,
        "grouped-flops": machine.grouped_flops,
        "attention-flops": machine.attention_flops,
        "bandwidth": machine.bandwidth,
        "latency": machine.latency,
        "cores": machine.cores,
        **{name.replace("_", "-"): getattr(machine, name) for name in GPU_MARGIN},
    }
    return machine, " ".join(f"--{name} {value:.3g}" for name, value in flags.items())


def machine_of(
    config: Config, timed: Mapping[int, dict[str, float]], link: dict[str, float]
) -> Machine:
    """Solve for rates: seconds are tokens times seconds per token, plus fixed seconds of layers.

    Args:
        config: Configuration that was timed.
        timed: Results of `time_model` with microbatches of two sizes, the smaller one first.
        link: Result of `time_link`.
    """
    (few, small), (many, large) = timed.items()
    work = whole_model(config, int(small["vocab_size"]))
    # Forward, and backward as two forwards.
    first, second = small["microbatch"] / 3, large["microbatch"] / 3
    # If both sizes take the same time, all of it is fixed; if the time is proportional, none is.
    fixed = min(max(first * many - second * few, 0.0) / (many - few), _MOST_FIXED * second)
    per_token = (second - fixed) / (many * config.data.seq_len)
    parameters, gradients, optimizer = static_memory(config, [work], StageLayout())
    touched = 2 * parameters + gradients + 2 * optimizer
    bandwidth = (_LARGE - _SMALL) / max(link["large"] - link["small"], 1e-9)
    # The rest of a step: sums over replicas, which have a price of their own, norms, the update.
    rest = min(small["rest"], large["rest"]) - small["ranks"] // 2 * gradients / bandwidth
    return Machine(
        flops=work.flops / per_token,
        memory=small["memory"],
        memory_bandwidth=touched / max(rest, small["optimizer"]),
        layer_seconds=fixed / config.model.num_layers,
        bandwidth=bandwidth,
        latency=link["small"],
        node_size=1 << 20,
        node_bandwidth=bandwidth,
        node_latency=link["small"],
        cores=int(small["cores"]),
    ).with_values(**(GPU_MARGIN if small.get("is_gpu") else {}))


def with_latency(machine: Machine, timed: Sequence[tuple[Config, dict[str, float]]]) -> Machine:
    """Solve for the mean latency of an exchange, which is at least that of a message alone.

    Args:
        machine: Machine with all other rates.
        timed: Layouts of two ranks that exchange inside layers, with results of `time_model`.
    """
    waited = messages = 0.0
    for config, found in timed:
        free, delayed = (
            sum(
                stage.full
                for stage in Plan(
                    config,
                    machine.with_values(latency=latency, node_latency=latency),
                    vocab_size=int(found["vocab_size"]),
                ).prices
            )
            for latency in (0.0, 1.0)
        )
        waited += found["microbatch"] - free
        messages += delayed - free
    if not messages:
        return machine
    latency = max(machine.latency, waited / messages)  # in training no less than alone
    return machine.with_values(latency=latency, node_latency=latency)


def _exchanging(config: Config, *, size: int) -> list[Config]:
    """Return the first two valid layouts of two ranks that exchange inside layers."""
    layouts = []
    for axes in _EXCHANGING:
        ranks = 1 if "mesh.dp_replicate" not in axes else 2
        batch = {
            "train.microbatch_size": size,
            "train.global_batch_size": ranks * _MICROBATCHES * size,
        }
        found = with_keys(_plain(config), {**axes, **batch, "mesh.gather": "stage"})
        if rules.allows_mesh(found) and rules.allows_pipeline(found):
            layouts.append(found)
    return layouts[:2]


def _timed(config: Config, folder: Path, *, size: int) -> dict[str, float]:
    on_cpu = config.launch.device == "cpu" or not torch.cuda.is_available()
    ranks = 2 if on_cpu and usable_cores() > 1 else 1
    keys = {
        "mesh.dp_replicate": ranks,
        "train.microbatch_size": size,
        "train.global_batch_size": ranks * _MICROBATCHES * size,
    }
    return _run(folder, with_keys(_plain(config), keys), "time_model")


def _plain(config: Config) -> Config:
    return one_process(checked_config(config, dtype=config.train.dtype))


def _run(folder: Path, config: Config, function: str) -> dict[str, float]:
    run_dir = folder / f"{function}-{len(list(folder.iterdir()))}"
    run_dir.mkdir()
    status = run_entry(config, run_dir, entry=f"{__name__}:{function}", data=folder / "data")
    if status:
        raise RunFailedError(f"a process that measures ended with status {status}", status=status)
    found: dict[str, float] = json.loads((run_dir / _RESULT).read_text())
    return found


def time_model(config: Config, *, worker: Worker) -> int:
    """Train a few steps, and write the median seconds of their parts on this rank."""
    trainer = start(config, worker)
    microbatches, updates, others = [], [], []
    for _ in range(_STEPS):
        began = time.perf_counter()
        trainer.train_step()
        synchronize(trainer.device)
        whole = time.perf_counter() - began
        computing = sum(s.end - s.start for s in trainer.timeline if s.step.type in _COMPUTE)
        microbatches.append(computing / _MICROBATCHES)
        others.append(whole - computing)
        for parameter in trainer.parameters:
            parameter.local.grad = torch.zeros_like(parameter.local)
        synchronize(trainer.device)
        began = time.perf_counter()
        trainer.optimizer.step()
        synchronize(trainer.device)
        updates.append(time.perf_counter() - began)
        trainer.optimizer.zero_grad()
    on_cpu = trainer.device.type == "cpu"
    if on_cpu:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / usable_cores()
    else:
        memory = torch.cuda.get_device_properties(trainer.device).total_memory
    result = {
        # The first step also allocates memory.
        "microbatch": statistics.median(microbatches[1:]),
        "optimizer": statistics.median(updates[1:]),
        "rest": statistics.median(others[1:]),
        "vocab_size": trainer.tokenizer.vocab_size,
        "memory": memory,
        "is_gpu": float(trainer.device.type == "cuda"),
        "cores": usable_cores() if on_cpu else 0,
        "ranks": worker.info.world_size,
    }
    if worker.info.rank == 0:
        (worker.run_dir / _RESULT).write_text(json.dumps(result))
    shutdown()
    return 0


_COMPUTE = (MetaStepType.FWD, MetaStepType.BWD)


def time_link(config: Config, *, worker: Worker) -> int:
    """Exchange messages between two ranks that compute, and write the mean seconds of a message."""
    launch = config.launch
    runtime = initialize(
        worker.info,
        device_type=launch.device,
        timeout=timedelta(seconds=config.timeouts.step),
        backend=launch.backend,
    )
    group = new_group([[0, 1]], name="link")
    assert group is not None
    tokens = config.train.microbatch_size * config.data.seq_len
    left = torch.ones(tokens, config.model.dim, device=runtime.device)
    right = torch.ones(config.model.dim, config.model.dim, device=runtime.device)

    def mean_seconds(size: int) -> float:
        message = torch.zeros(2, size, dtype=torch.uint8, device=runtime.device)
        seconds = []
        for index in range(_ROUNDS):
            worker.heartbeats.beat(step=index, phase="exchange", waiting=True)
            torch.mm(left, right)
            synchronize(runtime.device)
            began = time.perf_counter()
            launch_all_to_all(message, group=group).wait()
            synchronize(runtime.device)
            seconds.append(time.perf_counter() - began)
        # The mean of both ranks in each round: while one waits, the other works.
        sums = torch.tensor(seconds[_FIRST:], dtype=torch.float64)
        dist.all_reduce(sums, group=runtime.control)
        # Training pays for all waits, but the longest come from other programs.
        return statistics.fmean(sorted((sums / 2).tolist())[:-_LONGEST])

    for _ in range(_ATTEMPTS):  # other programs may be busy during one of them
        result = {"small": mean_seconds(_SMALL), "large": mean_seconds(_LARGE)}
        if result["large"] > result["small"]:
            break
    else:
        raise HpError(f"{_LARGE} bytes took no longer than {_SMALL}: measure again")
    if runtime.info.rank == 0:
        (worker.run_dir / _RESULT).write_text(json.dumps(result))
    shutdown()
    return 0


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
