"""Rows for experts in buffers of a fixed size: what does not fit is computed again."""

import time
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
from torch import Tensor

from hp_base.errors import ConfigError
from hp_data import load_tokenizer
from hp_platform import RankInfo, initialize
from hp_platform.testing import run_distributed
from hp_trainer.config import Config
from hp_trainer.config.options import resolve
from hp_trainer.training.trainer import Trainer
from integration_tests.runs import config_of, prepare_run, worker_of

EXACT, TIGHT, ROOMY = 0.0, 1.0, 100.0
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "fsdp2-ep2": {"mesh": {"dp_shard": 2, "ep": 2}},
    "fsdp4-ep2-recomputed": {
        "mesh": {"dp_shard": 4, "ep": 2, "gather": "block"},
        "train": {"recompute": "full"},
        "model": {"correction_bias": True},
    },
    "pp2-ep2": {
        "mesh": {"pp": 2, "dp_replicate": 2, "ep": 2},
        "pipeline": {"schedule": "interleaved_1f1b", "stages_per_rank": 2},
        "model": {"num_mtp_modules": 2},
    },
    "pp2-ep2-zero-bubble": {
        "mesh": {"pp": 2, "dp_shard": 2, "ep": 2},
        "pipeline": {"schedule": "dualpipe_v", "stages_per_rank": 2},
        "model": {"num_mtp_modules": 1, "tie_embeddings": True},
    },
    "hsdp-block": {
        "mesh": {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "gather": "block"},
        "model": {"correction_bias": True},
    },
}


def trained(
    config: Config, buffer: float, directory: Path
) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """Losses, state and notes of rank 0 after some steps with a buffer."""
    mesh = msgspec.structs.replace(config.mesh, ep_buffer=buffer)
    config = msgspec.structs.replace(config, mesh=mesh)
    address = prepare_run(config, directory)
    run = partial(_train_rank, msgspec.json.encode(config), str(directory), address)
    return run_distributed(run, world_size=config.world_size, timeout=120)[0]


def _train_rank(
    encoded: bytes, directory: str, address: str
) -> tuple[list[float], dict[str, Tensor], list[str]]:
    config = msgspec.json.decode(encoded, type=Config)
    info = RankInfo.from_env()
    assert info is not None
    runtime = initialize(info, device_type="cpu", init_method=address)
    trainer = Trainer(config, worker_of(info, Path(directory)), runtime, load_tokenizer(""))
    losses = [trainer.train_step()[0].loss for _ in range(config.train.steps)]
    losses.append(trainer.evaluate() or 0.0)
    state = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
    trainer.close()
    return losses, state, trainer.problems


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sample("fsdp2-ep2")
def test_a_step_whose_rows_do_not_fit_is_the_step_with_room(layout: str, tmp_path: Path) -> None:
    config = config_of(LAYOUTS[layout], train={"dtype": "float64", "steps": 3})
    exact, tight, roomy = (
        trained(config, buffer, tmp_path / str(buffer)) for buffer in (EXACT, TIGHT, ROOMY)
    )
    assert exact[2] == roomy[2] == []
    assert [note.partition(":")[2].partition(":")[0] for note in tight[2]] == [
        f" step {step} is run again" for step in (1, 2, 3)
    ]
    # Rows that travel one by one are added up in another order than those that travel once.
    for actual, bound in ((tight, 0.0), (roomy, 1e-12)):
        assert actual[0] == pytest.approx(exact[0], rel=bound, abs=bound)
        for name, expected in exact[1].items():
            torch.testing.assert_close(actual[1][name], expected, rtol=bound, atol=bound)


def test_the_seconds_of_a_step_are_those_of_both_runs(tmp_path: Path) -> None:
    config = config_of(LAYOUTS["fsdp2-ep2"], mesh={"ep_buffer": TIGHT})
    address = prepare_run(config, tmp_path)
    run = partial(_count_calls, msgspec.json.encode(config), str(tmp_path), address)
    assert run_distributed(run, world_size=2, timeout=120) == [[4.0, 4.0]] * 2


def _count_calls(encoded: bytes, directory: str, address: str) -> list[float]:
    """CPU seconds of two steps that are run again, if a second passes from reading to reading."""
    config = msgspec.json.decode(encoded, type=Config)
    info = RankInfo.from_env()
    assert info is not None
    runtime = initialize(info, device_type="cpu", init_method=address)
    clock = SimpleNamespace(process_time=count().__next__, perf_counter=time.perf_counter)
    with patch("hp_trainer.training.gradients.time", clock):
        trainer = Trainer(config, worker_of(info, Path(directory)), runtime, load_tokenizer(""))
        seconds = [trainer.train_step()[0].cpu_seconds for _ in range(2)]
    trainer.close()
    return seconds


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([("mesh.ep_buffer", 0.5), ("mesh.ep", 2)], r"must be 0, or at least 1"),
        ([("mesh.ep_buffer", 2.0), ("mesh.ep", 1)], r"must be 0 with mesh.ep \(1\)"),
        (
            [("mesh.ep_buffer", 2.0), ("mesh.etp", 2), ("mesh.dp_replicate", 4)],
            r"must be 0 with mesh.etp \(2\)",
        ),
    ],
)
def test_buffers_that_cannot_be_are_refused(overrides: list[tuple[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve("quickstart", overrides, env={})
