"""State of Muon in checkpoints of torch: other numbers of ranks go on with it as one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hp_optim import Muon, muon_groups
from hp_platform.testing import run_distributed


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(self.embed(tokens)).relu())
        return y


def make(*, is_sharded: bool) -> tuple[nn.Module, Muon]:
    torch.manual_seed(3)
    tower = Tower().double()
    if is_sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for child in (tower.up, tower.down, tower):
            fully_shard(child, mesh=mesh)
    groups = muon_groups(tower, options={"lr": 0.01})
    return tower, Muon(groups, lr=0.05, split={"up.weight": (4, 6)}, dtype=torch.float64)


def train(tower: nn.Module, optimizer: Muon, steps: range) -> dict[str, Tensor]:
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + step)
        optimizer.zero_grad()
        tower(torch.arange(8) * (step + 2) % 7).square().mean().backward()
        optimizer.step()
    parameters = {name: p.detach() for name, p in tower.named_parameters()}
    return {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in parameters.items()}


def save(folder: Path) -> None:
    tower, optimizer = make(is_sharded=True)
    train(tower, optimizer, range(2))
    state = {
        "model": get_model_state_dict(tower),
        "optimizer": get_optimizer_state_dict(tower, optimizer),
    }
    state_dict_saver.save(state, checkpoint_id=folder)


def load(folder: Path, flat: bool) -> tuple[dict[str, Tensor], list[float], list[float]]:
    tower, optimizer = make(is_sharded=True)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, kept = get_model_state_dict(tower), get_optimizer_state_dict(tower, optimizer)
    state = {"model": model, "optimizer": kept}
    state_dict_loader.load(state, checkpoint_id=folder)
    set_model_state_dict(tower, model)
    set_optimizer_state_dict(tower, optimizer, kept)
    if flat:  # once more, by the other form
        flattened = get_optimizer_state_dict(tower, optimizer, options=options)
        set_optimizer_state_dict(tower, optimizer, flattened, options=options)
    rates = [group["lr"] for group in optimizer.param_groups]
    steps = [s["step"].item() for s in optimizer.state.values() if "step" in s]
    return train(tower, optimizer, range(2, 4)), rates, steps


@pytest.mark.parametrize(("world", "flat"), [(1, False), (2, True), (4, False)])
def test_a_checkpoint_of_two_ranks_goes_on_in_any_number(
    tmp_path: Path, world: int, flat: bool
) -> None:
    expected = train(*make(is_sharded=False), range(4))
    run_distributed(save, tmp_path, world_size=2)
    for found, rates, steps in run_distributed(load, tmp_path, flat, world_size=world):
        assert rates == [0.05 / 2] * 3
        assert steps == [2.0] * 2
        for name, parameter in found.items():
            assert (parameter - expected[name]).abs().max() <= 1e-12, name
