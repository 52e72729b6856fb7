"""What ranks do together before a run is built: meet, and let one of each node prepare the data."""

import os
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from hp_base.command_line import say
from hp_base.environment import external_world
from hp_base.errors import DataError, HangError, told
from hp_data import Tokenizer, load_tokenizer
from hp_data.cache import Cache
from hp_data.preparation import prepare
from hp_platform import Runtime, all_gather_json, initialize, new_group
from hp_platform.failures.agreement import agreeing
from hp_trainer.config import Config
from hp_trainer.config.timeouts import Timeouts
from hp_trainer.launch.task import Worker
from hp_trainer.training import gpu_settings
from hp_trainer.training.waiting import Interrupted, Stopped, Waiting


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
