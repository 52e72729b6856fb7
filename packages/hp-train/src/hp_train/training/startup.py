"""What ranks do together before a run is built: meet, and let one of each node prepare the data."""

import os
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hp_base.command_line import say
from hp_base.environment import external_world
from hp_base.errors import DataError, HangError, told
from hp_data import Tokenizer, load_tokenizer
from hp_data.cache import Cache
from hp_data.prepare import prepare
from hp_platform import Runtime, all_gather_json, initialize, new_group
from hp_platform.failures.agreement import agreeing
from hp_train.config import Config
from hp_train.config.timeouts import Timeouts
from hp_train.costs.machine import MACHINES, Machine, machine_found
from hp_train.launch.task import Worker
from hp_train.price.gather import decided
from hp_train.step_plan import StepCosts
from hp_train.step_plan.costs_file import read_costs
from hp_train.step_plan.learned import learned_costs
from hp_train.training import gpu_settings
from hp_train.training.waiting import Interrupted, Stopped, Waiting


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
    """Tokenise once per node; every rank learns of a failure before anything is built on it.

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


def decide_gather(config: Config, runtime: Runtime, *, vocab_size: int) -> Config:
    """The config with `mesh.gather` decided, the same on every rank. All ranks call this together.

    On a CPU, whose memory is not its own and whose rates nobody has measured, it is by stage.

    Args:
        config: Validated; the same on every rank.
        runtime: The initialised world.
        vocab_size: Rows of the embedding.
    """
    if config.mesh.gather != "auto" or runtime.device.type != "cuda":
        return config
    return decided(config, machine_of(runtime), vocab_size=vocab_size)


def step_costs(config: Config, runtime: Runtime, *, vocab_size: int) -> StepCosts:
    """What documents cost the stages where steps are planned. All ranks call this together.

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
