"""Every operator of training has its operands on one device, by running it on a stand-in."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch

from hp_data import load_tokenizer
from hp_platform import RankInfo, initialize
from hp_platform.testing import run_distributed
from hp_trainer.config import Config
from hp_trainer.config.options import resolve
from hp_trainer.training import optimizer
from hp_trainer.training.optimizer import clip_gradients
from hp_trainer.training.trainer import Trainer
from integration_tests.layouts.stand_in_device import STAND_IN, watch_devices
from integration_tests.runs import config_of, prepare_run, worker_of

RICH: dict[str, Any] = {"tie_embeddings": True, "num_mtp_modules": 2, "correction_bias": True}
CLIPPED: dict[str, Any] = {"max_grad_norm": 1e-3, "eval_every": 1}

LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "one": {"model": RICH},
    "bf16-documents": {
        "train": {"dtype": "bfloat16", "recompute": "full"},
        "data": {"documents": "separate"},
    },
    "fsdp2": {"mesh": {"dp_shard": 2}, "model": RICH, "train": {"dtype": "bfloat16"}},
    "dp2-ep2": {"mesh": {"dp_replicate": 2, "ep": 2}, "train": {"recompute": "feed_forward"}},
    "tp2": {"mesh": {"tp": 2}, "model": RICH},
    "cp2": {"mesh": {"cp": 2, "cp_heads": 1}, "model": RICH},
    "pp2-zero-bubble": {
        "mesh": {"pp": 2},
        "pipeline": {"schedule": "zbv", "stages_per_rank": 2},
        "model": RICH,
    },
    "overlap": {
        "mesh": {"pp": 2, "dp_replicate": 2, "ep": 2},
        "pipeline": {"schedule": "dualpipe_v", "stages_per_rank": 2, "overlap": True},
    },
    "unequal": {"mesh": {"pp": 2, "stage_tp": [1, 2]}, "pipeline": {"schedule": "1f1b"}},
}
PRESETS = ("debug-deepseek-v3", "debug-gpt-oss", "debug-qwen3-moe")


def _train(encoded: bytes, directory: str, address: str, fault: str = "") -> list[str]:
    """Train, save, and go on from what was saved; returns what is wrong."""
    config = msgspec.json.decode(encoded, type=Config)
    info = RankInfo.from_env()
    assert info is not None
    with watch_devices() as found:
        runtime = initialize(info, device_type="cpu", init_method=address)
        runtime = replace(runtime, device=STAND_IN)
        for steps in (2, 3):
            worker = worker_of(info, Path(directory))
            trainer = Trainer(config, worker, runtime, load_tokenizer(""))
            trainer.resume()
            devices = {parameter.local.device for parameter in trainer.parameters}
            assert devices == {STAND_IN}, devices
            if fault:
                _break(trainer, fault)
            while trainer.step < steps:
                trainer.train_step()
            assert trainer.evaluate() is not None
            trainer.save()
            trainer.pipeline.close()
        return found


def _break(trainer: Trainer, fault: str) -> None:
    """Put something of the step on the host, as a slip of the pen would."""
    if fault == "step of adam":
        for state in trainer.optimizer.state.values():
            state["step"] = torch.zeros(())
    elif fault == "factor of clipping":

        def clip(parameters: Any, norm: float, max_norm: float) -> None:
            clip_gradients(parameters, norm, max_norm)
            for parameter in parameters:
                parameter.local.grad.mul_(torch.ones(1))

        patch.object(optimizer, "clip_gradients", clip).start()


def run(config: Config, directory: Path, fault: str = "") -> list[str]:
    """What all ranks found, each line once."""
    address = prepare_run(config, directory)
    job = partial(_train, msgspec.json.encode(config), str(directory), address, fault)
    found = run_distributed(job, world_size=config.world_size, timeout=240)
    return sorted({line for rank in found for line in rank})


@pytest.mark.sample("bf16-documents")
@pytest.mark.parametrize("name", LAYOUTS)
def test_operands_are_on_one_device_in_every_layout(name: str, tmp_path: Path) -> None:
    train = {**CLIPPED, "global_batch_size": 16 if name == "overlap" else 8}
    config = config_of(LAYOUTS[name], train={**train, **LAYOUTS[name].get("train", {})})
    assert run(config, tmp_path) == []


@pytest.mark.sample("debug-deepseek-v3", "debug-gpt-oss")
@pytest.mark.parametrize("preset", PRESETS)
def test_operands_are_on_one_device_in_every_family(preset: str, tmp_path: Path) -> None:
    config = resolve(preset, [("train.global_batch_size", "4"), ("data.seq_len", "32")], env={})
    assert run(config.config, tmp_path) == []


@pytest.mark.sample("factor of clipping")
@pytest.mark.parametrize("fault", ["step of adam", "factor of clipping"])
def test_a_slip_is_found(fault: str, tmp_path: Path) -> None:
    found = run(config_of(train=CLIPPED), tmp_path, fault)
    operator = {"step of adam": "aten::_fused_adamw_", "factor of clipping": "aten::mul_.Tensor"}
    assert {line.split(": ")[0] for line in found} == {operator[fault]}
