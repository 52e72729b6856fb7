"""The example of the README runs; a program of torch alone saves on two ranks and loads on one."""

import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hp_checkpoint import load_latest, save_checkpoint, verify_checkpoint
from hp_platform.testing import run_distributed

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.usefixtures("forked_programs")
def test_the_example_of_the_readme_loads_what_it_has_saved(tmp_path: Path) -> None:
    [example] = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    program = tmp_path / "example.py"
    program.write_text(example)
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "step-00000010 10 {'lr': 0.1} True\n"


def trained(*, is_sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train a model of plain torch for a step, under FSDP2 or on one rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    if is_sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(12.0).reshape(2, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and moments by global name, as any program may call them."""
    found = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            found[f"optimizer.{moment}.{name}"] = optimizer.state[parameter][moment]
    return found


def save_sharded(folder: Path) -> str:
    group = dist.group.WORLD
    assert group is not None
    tensors = tensors_of(*trained(is_sharded=True))
    return save_checkpoint(
        folder, step=1, tensors=tensors, extra={"lr": 0.1}, group=group, keep=1
    ).name


def load_whole(folder: Path) -> tuple[int, dict[str, float], float]:
    """Load on one rank; return the largest difference from what one rank itself has trained."""
    group = dist.group.WORLD
    assert group is not None
    tensors = tensors_of(*trained(is_sharded=False))
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.detach().zero_()
    loaded = load_latest(folder, tensors=tensors, group=group)
    assert loaded is not None
    errors = [float((tensors[name] - expected[name]).abs().max()) for name in tensors]
    return loaded.step, loaded.extra, max(errors)


def test_what_two_ranks_of_fsdp2_saved_is_loaded_by_one(tmp_path: Path) -> None:
    assert run_distributed(save_sharded, tmp_path / "run", world_size=2) == ["step-00000001"] * 2
    verify_checkpoint(tmp_path / "run" / "step-00000001")
    [(step, extra, error)] = run_distributed(load_whole, tmp_path / "run", world_size=1)
    assert (step, extra) == (1, {"lr": 0.1})
    assert error < 1e-6


def test_no_trainer_of_ours_is_needed() -> None:
    names = {re.split(r"[<>=\[ ;]", text)[0] for text in requires("hp-checkpoint") or ()}
    assert names == {"hp-base", "hp-platform", "torch"}
