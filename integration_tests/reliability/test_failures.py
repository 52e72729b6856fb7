"""A failure on one rank in every phase of a run: every rank ends, and names rank, place and error.

Ranks are processes that nobody supervises: what they say they found out among themselves.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import Tensor

import hp_schedule.runtime
import hp_trainer.training.train
import hp_trainer.training.trainer
from hp_expert import GroupedExperts, TopKRouter
from hp_platform import PeerError, RankInfo
from hp_platform.testing import run_distributed
from hp_trainer.config import Config
from hp_trainer.launch.worker import one_line
from hp_trainer.model import attention
from hp_trainer.training import optimizer
from hp_trainer.training.batches import Batches
from hp_trainer.training.checkpointer import Checkpointer
from hp_trainer.training.optimizer import Update
from hp_trainer.training.trainer import Trainer
from integration_tests.runs import config_of, worker_of, write_corpus

WORLD = 4
TIMEOUT_SECONDS = 60
"""Of collectives; longer than any rank may take to end, so that none ends because of it."""
CONNECT_SECONDS = 10
"""Where ranks are about to make a group with one that has failed, nothing but this ends them."""

PIPELINE = {"mesh": {"pp": 2, "dp_replicate": 2, "ep": 2}, "pipeline": {"stages_per_rank": 1}}
OVERLAP: dict[str, dict[str, Any]] = {
    "mesh": {"pp": 2, "dp_replicate": 2, "ep": 2},
    "pipeline": {"schedule": "dualpipe_v", "stages_per_rank": 2, "overlap": True},
}
CONTEXT = {"mesh": {"pp": 2, "cp": 2, "ep": 2}, "pipeline": {"stages_per_rank": 1}}
PLACE = ("step ", "stage ", "microbatch ")
SHARDED = {"mesh": {"dp_shard": 4, "ep": 2}}


@dataclass(frozen=True)
class Fault:
    """What fails on one rank.

    Attributes:
        owner: Where the function is.
        name: Of the function.
        place: What every rank's message must contain besides rank and error.
        layout: Of the run.
        rank: That fails.
        call: The call of the function that fails, counted from 1.
        in_backward: Whether the backward of what the function returns fails instead.
        timeout_seconds: Of the collectives of the run.
    """

    owner: Any
    name: str
    place: tuple[str, ...]
    layout: dict[str, dict[str, Any]] = field(default_factory=lambda: PIPELINE)
    rank: int = 1
    call: int = 3
    in_backward: bool = False
    timeout_seconds: int = TIMEOUT_SECONDS


FAULTS = {
    "build": Fault(
        hp_trainer.training.trainer,
        "build_pipeline",
        ("build",),
        call=1,
        timeout_seconds=CONNECT_SECONDS,
    ),
    "data": Fault(Batches, "cut", ("step ",)),
    "forward": Fault(attention.GroupedQueryAttention, "forward", PLACE, rank=3),
    "attention over context": Fault(attention, "attend", PLACE, layout=CONTEXT, rank=2),
    "router": Fault(TopKRouter, "forward", (*PLACE, "router"), rank=2),
    "experts": Fault(GroupedExperts, "forward", (*PLACE, "experts")),
    "experts of a sharded model": Fault(
        GroupedExperts, "forward", ("step ", "experts"), layout=SHARDED, rank=3
    ),
    "backward of experts": Fault(GroupedExperts, "forward", PLACE, in_backward=True, rank=3),
    "overlapped pair, forward": Fault(
        GroupedExperts, "forward", (*PLACE, "experts"), OVERLAP, call=7
    ),
    "overlapped pair, backward": Fault(
        GroupedExperts, "forward", ("step ", "stage "), OVERLAP, call=7, in_backward=True
    ),
    "pipeline message": Fault(hp_schedule.runtime.TorchTransport, "send", PLACE, rank=0),
    "gradient reduction": Fault(
        hp_trainer.training.trainer, "reduce_gradients", ("step 3", "gradient reduction")
    ),
    "clipping": Fault(optimizer, "clip_gradients", ("step 3", "optimizer"), rank=0),
    "optimizer": Fault(Update, "apply", ("step 3", "optimizer"), rank=2),
    "evaluation": Fault(Trainer, "_evaluate", ("evaluation",), call=1, rank=3),
    "save": Fault(Checkpointer, "save", ("save",), call=1, rank=2),
}


@contextmanager
def injected(fault: Fault) -> Iterator[None]:
    """Have a call fail in this process."""
    function: Callable[..., Any] = getattr(fault.owner, fault.name)
    calls = 0

    def unlucky(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fault.call and not fault.in_backward:
            raise MemoryError("no room for this test")
        result = function(*args, **kwargs)
        if calls >= fault.call and fault.in_backward and result.requires_grad:
            result.register_hook(no_room)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fault.owner, fault.name, unlucky)
        yield


def no_room(_gradient: Tensor) -> None:
    raise MemoryError("no room for this test")


def run(case: str, encoded: bytes, directory: Path) -> tuple[str, str, float]:
    """Train as one rank, and return how it ended: kind of error, message, seconds after it."""
    config = msgspec.json.decode(encoded, type=Config)
    info = RankInfo.from_env()
    assert info is not None
    fault = FAULTS[case]
    worker = worker_of(info, directory)
    began = time.monotonic()
    with pytest.MonkeyPatch.context() if info.rank != fault.rank else injected(fault):
        try:
            hp_trainer.training.train.main(config, worker=worker)
        except (MemoryError, PeerError) as error:
            return type(error).__name__, one_line(error), time.monotonic() - began
    return "nothing", "", 0.0


@pytest.mark.sample(
    "attention over context",
    "overlapped pair, backward",
    "pipeline message",
    "gradient reduction",
    "save",
)
@pytest.mark.parametrize("case", FAULTS)
def test_every_rank_ends_and_names_the_first_that_failed(case: str, tmp_path: Path) -> None:
    fault = FAULTS[case]
    config = config_of(
        fault.layout,
        data={"paths": [str(write_corpus(tmp_path))]},
        train={"steps": 3, "eval_every": 3, "save_every": 0},
        launch={"step_timeout_seconds": fault.timeout_seconds},
    )
    ends = run_distributed(
        run, case, msgspec.json.encode(config), tmp_path, world_size=WORLD, timeout=50
    )
    for rank, (kind, message, _) in enumerate(ends):
        assert kind == ("MemoryError" if rank == fault.rank else "PeerError"), message
        assert f"rank {fault.rank}" in message
        assert "MemoryError: no room for this test" in message
        assert all(part in message for part in fault.place), message
