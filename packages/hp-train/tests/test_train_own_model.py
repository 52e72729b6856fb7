"""What is wrong with a model of one's own is said in one line, and what is right is known of it."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hp_base.errors import ConfigError
from hp_expert import GroupedExperts, TopKRouter
from hp_plan.costs.modules import kernels
from hp_train.cli import main
from hp_trainer.config import Config, ModelConfig
from hp_trainer.config.options import resolve, with_keys
from hp_trainer.layout.parameter import ParameterSpec
from hp_trainer.model import declare
from hp_trainer.model.parameters import declared
from hp_trainer.model.transformer import build_stage

MODULE = """
from torch import nn
from hp_trainer.model import Stage
class Other(nn.Module):
    def __init__(self, *args, **kwargs): super().__init__()
"""


def build(factory: str) -> None:
    model = ModelConfig(factory=factory)
    build_stage(model, 8, layers=range(1), first=True, last=True)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("{folder}/own.py:Missing", "must be importable: AttributeError"),
        ("{folder}/own.py:Other", "must make a hp_trainer.model.Stage, not hp_model_own.Other"),
        ("{folder}/broken.py:Other", "must be importable: ZeroDivisionError"),
        ("no_such_package_at_all:Other", "must be importable: ModuleNotFoundError"),
    ],
)
def test_what_is_no_model_is_refused(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match=reason):
        build(name.format(folder=tmp_path))


def test_a_file_imports_what_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_own_model.py").write_text("SIZE = 3")
    (tmp_path / "torch.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from torch import nn\n"
        "from beside_own_model import SIZE\n"
        "from hp_trainer.model import Stage\n"
        "@dataclass\n"
        "class Sizes:\n"
        "    dim: int = SIZE\n"
        "class Own(Stage):\n"
        "    def __init__(self, *args, compute_dtype, **kwargs):\n"
        "        super().__init__(compute_dtype=compute_dtype)\n"
        "        self.layers = nn.ModuleDict({'0': nn.Linear(Sizes().dim, 3)})\n"
    )
    model = ModelConfig(factory=f"{tmp_path}/torch.py:Own")
    stage = build_stage(model, 8, layers=range(1), first=True, last=True)
    assert [*declared(stage)] == ["layers.0.weight", "layers.0.bias"]


@pytest.mark.parametrize(
    ("factory", "keys", "reason"),
    [
        ("own.py", {}, r'model.factory \("own.py"\) must be package.module:function or'),
        (":Other", {}, r'model.factory \(":Other"\) must be package.module:function or'),
        ("nowhere/own.py:Other", {}, r'model.factory \("nowhere/own.py"\) must be a file'),
        ("own:Other", {"mesh.tp": 2}, r"mesh.tp \(2\) must be 1 with model.factory"),
        ("own:Other", {"train.recompute": "attention"}, "train.recompute .* must be none or full"),
        ("own:Other", {"model.num_mtp_modules": 1}, "model.num_mtp_modules .1. must be 0"),
        ("own:Other", {"train.optimizer": "muon"}, 'train.optimizer .* must be "adamw" with model'),
        ("own:Other", {"model.tie_embeddings": True}, "model.tie_embeddings .* must be false"),
    ],
)
def test_what_cannot_be_done_with_it_is_refused_before_it_starts(
    factory: str, keys: dict[str, object], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        resolve("quickstart", {"model.factory": factory, **keys}.items(), env={})


def test_the_oracle_does_not_judge_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--against", "oracle", "model.factory=own:Other"]) == 2
    assert "--against oracle knows no model of model.factory" in capsys.readouterr().err


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))
        self.linear = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.experts = GroupedExperts(2, 4, 8, bias=True)
        self.router = TopKRouter(4, 2, 1, bias=True, correction_bias=True)


def test_a_parameter_that_is_not_declared_is_named() -> None:
    with pytest.raises(ConfigError, match=r"parameter inner.scale of the model must be declared"):
        declared(nn.ModuleDict({"inner": Own()}))


def test_modules_of_torch_and_hp_expert_are_known() -> None:
    model = Own()
    declare(model, "model", scale=ParameterSpec("norm"))
    declare(model.linear, "proj")
    found = declared(model)
    assert [*found] == [
        *(name for name, _ in model.named_parameters()),
        *(name for name, _ in model.named_buffers()),
    ]
    kinds = {name: tensor.spec.kind for name, tensor in found.items()}
    assert {name for name, kind in kinds.items() if kind == "norm"} == {"scale", "norm.weight"}
    assert {name for name, kind in kinds.items() if kind == "matrix"} == {
        "linear.weight",
        "router.weight",
        *(f"experts.{name}" for name in ("w1", "w2", "w3")),
    }
    hidden = {name: found[f"experts.{name}"].spec.hidden_dim for name in ("w1", "w2", "b1", "b2")}
    assert hidden == {"w1": 1, "w2": 2, "b1": 1, "b2": None}
    assert found["linear.weight"].published == "model.proj.weight"
    assert found["scale"].published == "model.scale"


def test_a_tied_parameter_is_listed_once() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    assert [*declared(model)] == ["0.weight", "0.bias", "1.bias"]


def test_kernels_of_a_stage_that_returns_logits_are_learned_with_its_loss(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(LOGITS)
    model = ModelConfig(factory=f"{tmp_path}/plain.py:Plain", max_positions=64, num_layers=2)
    keys = {"data.seq_len": 32, "train.dtype": "bfloat16", "pipeline.stages_per_rank": 1}
    config = with_keys(Config(model=model), keys)
    (found,) = kernels(config, 256, num_stages=1)
    flops = sum(times * kernel.flops for kernel, times in found.forward.items())
    assert flops == 2 * model.dim * (2 * model.dim + 256)
    assert sum(times * kernel.launches for kernel, times in found.backward.items()) > 0


LOGITS = """
from torch import nn

from hp_trainer.model import Stage


class Plain(Stage):
    def __init__(self, config, vocab_size, *, layers, first, last, compute_dtype):
        super().__init__(compute_dtype=compute_dtype)
        self.table = nn.Embedding(vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): nn.Linear(config.dim, config.dim) for i in layers})
        self.head = nn.Linear(config.dim, vocab_size)

    def forward(self, x, *, microbatch):
        x = self.table(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)
"""
