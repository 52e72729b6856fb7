"""What the optimizer does to which parameters."""

import pytest
import torch
from msgspec.structs import replace

from hp_trainer.config.options import resolve
from hp_trainer.model import TransformerStage
from hp_trainer.model.initialization import initialize_parameters
from hp_trainer.model.parameters import named_parameters
from hp_trainer.training.optimizer import build_optimizer

KEPT = {"bias", "b1", "b2", "b3", "sinks"}


@pytest.mark.parametrize("preset", ["debug-gpt-oss", "debug-deepseek-v3", "debug-qwen3-moe"])
def test_matrices_are_decayed_and_norms_and_biases_are_not(preset: str) -> None:
    config = resolve(preset, env={}).config
    model = replace(config.model, num_layers=2)
    stage = TransformerStage(model, 32, layers=range(2), first=True, last=True)
    buffers = {name: buffer.zero_() for name, buffer in stage.named_buffers()}
    parameters = named_parameters(stage)
    initialize_parameters(parameters, model, seed=0)
    train = replace(config.train, learning_rate=0.5, weight_decay=0.5)
    optimizer = build_optimizer(parameters, train)
    before = {}
    for parameter in parameters:
        parameter.local.add_(1.0)  # biases start with zero, which nothing could decay
        before[parameter.name] = parameter.local.clone()
        parameter.local.grad = torch.zeros_like(parameter.local)
    optimizer.step()
    kept = {p.name for p in parameters if torch.equal(p.local, before[p.name])}
    expected = {n for n in before if n.rpartition(".")[2] in KEPT or n.endswith("norm.weight")}
    assert kept == expected
    for parameter in parameters:
        if parameter.name not in kept:
            assert torch.equal(parameter.local, before[parameter.name] * 0.75), parameter.name
    updated = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    assert updated == {id(parameter.local) for parameter in parameters}
    assert not updated & {id(buffer) for buffer in buffers.values()}
    if preset == "debug-gpt-oss":
        kinds = {name.rpartition(".")[2] for name in expected}
        assert kinds == {"weight", "bias", "b1", "b2", "b3", "sinks"}
