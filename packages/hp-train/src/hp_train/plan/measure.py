"""Measure the rates of this machine with the model that is to be trained.

Processes train a few steps with microbatches of two sizes, which tells what a product and what a
layer by itself takes. On a CPU they are two: a core is slower while the others compute. Two
processes then compute and exchange messages of two sizes in turn, since what an exchange takes in
training is for the most part the wait for the rank that comes later.
"""

import json
import os
import shutil
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hp_platform import initialize, launch_all_to_all, new_group, shutdown
from hp_schedule import MetaStepType
from hp_train.config import Config
from hp_train.config.space import with_keys
from hp_train.config.timeouts import Timeouts
from hp_train.costs.machine import GPU_MARGIN, Machine
from hp_train.costs.memory import static_memory
from hp_train.costs.modules import whole_model
from hp_train.errors import HpError
from hp_train.launch.launcher import run_entry
from hp_train.launch.task import Worker
from hp_train.layout.ranks import StageLayout
from hp_train.training.train import start
from hp_train.verify.pairs import checked_config, one_process

_STEPS, _MICROBATCHES, _ROUNDS = 4, 4, 60
_SMALL, _LARGE = 1 << 10, 1 << 22
_FIRST, _LONGEST = 2, 3  # rounds that are not counted
_RESULT = "measured.json"


def measure(config: Config) -> tuple[Machine, str]:
    """Measure what a device of this machine does.

    Args:
        config: Gives the model, the dtype and the microbatch size.

    Returns:
        The machine, all devices in one node, and the flags that say the same without measuring.

    Raises:
        HpError: When a process failed; the launcher has said why.
    """
    scratch = Path(tempfile.mkdtemp(prefix="hp-plan-"))
    size = config.train.microbatch_size
    try:
        small, large = (_timed(config, scratch, size=times * size) for times in (1, 2))
        link = _run(scratch, with_keys(_plain(config), {"mesh.dp_replicate": 2}), "time_link")
    except HpError as error:
        if error.exit_code > 128:  # somebody wanted it to end: nothing to look at
            shutil.rmtree(scratch, ignore_errors=True)
        raise
    shutil.rmtree(scratch, ignore_errors=True)
    machine = machine_of(config, small, large, link)
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
    config: Config,
    small: dict[str, float],
    large: dict[str, float],
    link: dict[str, float],
) -> Machine:
    """Solve for rates: time is tokens times the time of a token, plus that of the layers.

    Args:
        config: Configuration that was timed.
        small: What `time_model` found with the config's microbatches.
        large: The same times with microbatches twice as large.
        link: What `time_link` found.
    """
    tokens = config.train.microbatch_size * config.data.seq_len
    work = whole_model(config, int(small["vocab_size"]))
    # Forward, and backward as two forwards.
    first, second = small["microbatch"] / 3, large["microbatch"] / 3
    per_token = (second - first) / tokens
    fixed = first - per_token * tokens
    if per_token <= 0 or fixed < 0:  # too small a difference for this machine's noise
        per_token, fixed = second / (2 * tokens), 0.0
    one = StageLayout()
    parameters, gradients, optimizer = static_memory(config, [work], one)
    touched = 2 * parameters + gradients + 2 * optimizer
    bandwidth = (_LARGE - _SMALL) / max(link["large"] - link["small"], 1e-9)
    return Machine(
        flops=work.flops / per_token,
        memory=small["memory"],
        memory_bandwidth=touched / small["optimizer"],
        layer_seconds=fixed / config.model.num_layers,
        bandwidth=bandwidth,
        latency=link["small"],
        node_size=1 << 20,
        node_bandwidth=bandwidth,
        node_latency=link["small"],
        cores=int(small["cores"]),
    ).with_values(**(GPU_MARGIN if small.get("is_gpu") else {}))


def _timed(config: Config, scratch: Path, *, size: int) -> dict[str, float]:
    on_cpu = config.launch.device == "cpu" or not torch.cuda.is_available()
    ranks = 2 if on_cpu and _cores() > 1 else 1
    keys = {
        "mesh.dp_replicate": ranks,
        "train.microbatch_size": size,
        "train.global_batch_size": ranks * _MICROBATCHES * size,
    }
    return _run(scratch, with_keys(_plain(config), keys), "time_model")


def _plain(config: Config) -> Config:
    return one_process(checked_config(config, dtype=config.train.dtype))


def _run(scratch: Path, config: Config, function: str) -> dict[str, float]:
    run_dir = scratch / f"{function}-{len(list(scratch.iterdir()))}"
    run_dir.mkdir()
    status = run_entry(config, run_dir, entry=f"{__name__}:{function}", data=scratch / "data")
    if status:
        error = HpError(f"a process that measures ended with status {status}")
        error.exit_code = status
        raise error
    found: dict[str, float] = json.loads((run_dir / _RESULT).read_text())
    return found


def time_model(config: Config, *, worker: Worker) -> int:
    """Train a few steps, and leave the median times of their parts on this rank."""
    trainer = start(config, worker)
    microbatches, updates = [], []
    for _ in range(_STEPS):
        trainer.train_step()
        spans = [span for span in trainer.timeline if span.step.type in _COMPUTE]
        microbatches.append(sum(span.end - span.start for span in spans) / _MICROBATCHES)
        for parameter in trainer.parameters:
            parameter.local.grad = torch.zeros_like(parameter.local)
        _synchronize(trainer.device)
        began = time.perf_counter()
        trainer.optimizer.step()
        _synchronize(trainer.device)
        updates.append(time.perf_counter() - began)
        trainer.optimizer.zero_grad()
    on_cpu = trainer.device.type == "cpu"
    if on_cpu:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _cores()
    else:
        memory = torch.cuda.get_device_properties(trainer.device).total_memory
    result = {
        # The first step allocates what the others find.
        "microbatch": statistics.median(microbatches[1:]),
        "optimizer": statistics.median(updates[1:]),
        "vocab_size": trainer.tokenizer.vocab_size,
        "memory": memory,
        "is_gpu": float(trainer.device.type == "cuda"),
        "cores": _cores() if on_cpu else 0,
    }
    if worker.info.rank == 0:
        (worker.run_dir / _RESULT).write_text(json.dumps(result))
    shutdown()
    return 0


_COMPUTE = (MetaStepType.FWD, MetaStepType.BWD)


def time_link(config: Config, *, worker: Worker) -> int:
    """Exchange messages between two ranks that compute, and leave the mean times of one."""
    launch = config.launch
    runtime = initialize(
        worker.info,
        device_type=launch.device,
        timeout=timedelta(seconds=Timeouts.of(config).step),
        backend=launch.backend,
    )
    group = new_group([[0, 1]], name="link")
    assert group is not None
    tokens = config.train.microbatch_size * config.data.seq_len
    left = torch.ones(tokens, config.model.dim, device=runtime.device)
    right = torch.ones(config.model.dim, config.model.dim, device=runtime.device)
    result = {}
    for name, size in (("small", _SMALL), ("large", _LARGE)):
        message = torch.zeros(2, size, dtype=torch.uint8, device=runtime.device)
        seconds = []
        for index in range(_ROUNDS):
            worker.heartbeats.beat(step=index, phase="exchange", waiting=True)
            torch.mm(left, right)
            _synchronize(runtime.device)
            began = time.perf_counter()
            launch_all_to_all(message, group=group).wait()
            _synchronize(runtime.device)
            seconds.append(time.perf_counter() - began)
        # Of each round the mean of both ranks: where one waits, the other works.
        sums = torch.tensor(seconds[_FIRST:], dtype=torch.float64)
        dist.all_reduce(sums, group=runtime.control)
        # Most waits are short, and training pays for all; the longest are of other programs.
        result[name] = statistics.fmean(sorted((sums / 2).tolist())[:-_LONGEST])
    if result["large"] <= result["small"]:
        raise HpError(f"{_LARGE} bytes took no longer than {_SMALL}: measure again")
    if runtime.info.rank == 0:
        (worker.run_dir / _RESULT).write_text(json.dumps(result))
    shutdown()
    return 0


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
