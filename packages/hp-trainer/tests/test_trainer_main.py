"""What a rank does around and between its steps, as devices that run behind the host need it."""

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from hp_base.errors import DataError
from hp_base.signals import StopFlag
from hp_platform import RankInfo, initialize, shutdown
from hp_platform.testing import run_distributed
from hp_schedule import MetaStep, MetaStepType, Span, Timeline
from hp_trainer.config import Config
from hp_trainer.launch.heartbeats import Heartbeats
from hp_trainer.launch.task import Worker
from hp_trainer.layout.parameter import ParameterSpec
from hp_trainer.model.parameters import Parameter
from hp_trainer.training import train
from hp_trainer.training.batches import require_same_data
from hp_trainer.training.gradients import GradientNorm
from hp_trainer.training.startup import connect
from hp_trainer.training.trainer import Trainer

CONFIG = msgspec.convert(
    {
        "launch": {"device": "cpu", "init_timeout_seconds": 7, "step_timeout_seconds": 77},
        "model": {},
        "data": {},
        "train": {},
    },
    Config,
)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    heartbeats = Heartbeats.create(tmp_path / "heartbeats", num_ranks=1)
    yield Worker(
        info=RankInfo(0, 1, 0, 1), run_dir=tmp_path, heartbeats=heartbeats, stop=StopFlag()
    )
    shutdown()


def test_control_traffic_may_take_as_long_as_a_step(worker: Worker) -> None:
    runtime = connect(CONFIG, worker)
    options: Any = runtime.control._get_backend(torch.device("cpu")).options
    assert runtime.timeout == timedelta(seconds=7)
    assert options._timeout == timedelta(seconds=77)


def test_an_error_is_not_held_up_by_an_orderly_end(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    def wait_for_ever() -> None:
        raise AssertionError("NCCL would wait here for kernels whose peers never come")

    monkeypatch.setattr(train, "prepare_data", fail)
    monkeypatch.setattr(train, "shutdown", wait_for_ever)
    with pytest.raises(MemoryError):
        train.main(CONFIG, worker=worker)


class _Behind:
    """The result of a run that the device has not finished when the host returns."""

    losses: tuple[torch.Tensor, ...] = ()

    @property
    def timeline(self) -> Timeline:
        time.sleep(0.05)
        return Timeline([Span(0, MetaStep(MetaStepType.FWD, 0, 0), 0.0, 0.05)])


def test_no_rank_is_busy_for_longer_than_its_pipeline_runs() -> None:
    trainer: Any = SimpleNamespace(
        batches=SimpleNamespace(cut=lambda *_, **__: ([], [], [], 0, ())),
        planning=None,
        step=0,
        beat=lambda *_, **__: None,
        runner=SimpleNamespace(run_microbatches=lambda *_: _Behind(), loss_scale=1.0),
        data=None,
        next_sequence=0,
        pipeline=SimpleNamespace(forget_casts=lambda: None),
        _once=lambda losses: float(sum(losses)),
        parameters=[],
        mesh=None,
    )
    _, busy = Trainer.compute_gradients(trainer)
    assert 0 < busy <= 1


def test_squares_of_gradients_are_written_once_and_in_their_places(worker: Worker) -> None:
    runtime = connect(CONFIG, worker)
    whole, experts = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))
    whole.grad = torch.tensor([1.0, 2.0, 2.0])
    experts.grad = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    mesh: Any = SimpleNamespace(index={"dp_replicate": 0, "expert_replicate": 0}.__getitem__)
    stack = ParameterSpec(is_expert=True)
    parameters = [
        Parameter("z", whole, whole, (3,), (), ("dp_replicate",), (), ParameterSpec(), ((0, 3),)),
        Parameter(
            "a",
            experts,
            experts,
            (8, 2),
            (),
            ("expert_replicate",),
            (),
            stack,
            ((4, 6), (0, 2)),
        ),
    ]
    norm = GradientNorm(parameters, mesh, control=runtime.control)
    assert list(norm.sizes) == ["a[4]", "a[5]", "z"]
    assert norm.local_squares(torch.device("cpu")).tolist() == [25.0, 1.0, 9.0]
    mesh.index = {"dp_replicate": 1, "expert_replicate": 2}.__getitem__
    silent = GradientNorm(parameters, mesh, control=runtime.control)
    assert silent.local_squares(torch.device("cpu")).tolist() == [0.0, 0.0, 0.0]


def _compare_digests(differs: bool) -> str:
    runtime = initialize(device_type="cpu")
    mine = ("train", "eval 2" if differs and runtime.info.rank == 2 else "eval")
    try:
        require_same_data(mine, control=runtime.control)
    except DataError as error:
        return str(error)
    return ""


def test_ranks_that_read_other_text_are_named_on_every_rank() -> None:
    assert run_distributed(_compare_digests, False, world_size=3) == [""] * 3
    said = run_distributed(_compare_digests, True, world_size=3)
    assert set(said) == {"ranks 0 and 2 must read the same text, but their tokens differ"}
