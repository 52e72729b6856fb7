"""What one layout saves any other loads, optimizer included, and goes on with the same numbers."""

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from vtp_model import Block, First, Last, layout_of, modules_of, tp_group

from hp_base.errors import CheckpointError
from hp_checkpoint import Checkpoint
from hp_checkpoint.manifest import DTYPES
from hp_platform import PeerError
from hp_platform.testing import run_distributed
from hp_vtp import PipelineLayout
from hp_vtp.checkpoint import (
    load_checkpoint,
    load_optimizer,
    optimizer_dim,
    optimizer_tensors,
    remove_unfinished,
    save_checkpoint,
)


def dim_of(name: str) -> int | None:
    return {"up": 0, "down": 1}.get(name.rpartition(".")[2])


DIM = optimizer_dim(dim_of)


def parameters_of(modules: dict[int, nn.Module]) -> dict[str, nn.Parameter]:
    """By layout-independent name; a logical stage is a layer."""
    found: dict[str, nn.Parameter] = {}
    for stage, module in modules.items():
        block = module.block if isinstance(module, (First, Last)) else module
        assert isinstance(block, Block)
        found |= {f"layers.{stage}.{name}": p for name, p in block.named_parameters()}
        if isinstance(module, (First, Last)):
            found["embedding"] = module.embedding
    return found


def make(layout: PipelineLayout) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    parameters = parameters_of(modules_of(layout, tp_group(layout)))
    return parameters, torch.optim.AdamW(parameters.values(), lr=0.01)


def step(
    parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, layout: PipelineLayout
) -> None:
    """One step with gradients that depend on values and positions alone, not on the layout."""
    del layout
    for parameter in parameters.values():
        parameter.grad = parameter.detach().sin()
    optimizer.step()


def save(path: str, sizes: list[int]) -> dict[str, Tensor]:
    layout = layout_of(sizes, u_shape=True, sequence=False)
    parameters, optimizer = make(layout)
    for _ in range(3):
        step(parameters, optimizer, layout)
    group = dist.group.WORLD
    assert group is not None
    tensors = {**parameters, **optimizer_tensors(optimizer, parameters)}
    save_checkpoint(path, tensors, sharded_dim=DIM, layout=layout, group=group, extra={"step": 3})
    with pytest.raises((CheckpointError, PeerError), match="must not exist"):
        save_checkpoint(path, tensors, sharded_dim=DIM, layout=layout, group=group)
    assert not remove_unfinished(path)
    step(parameters, optimizer, layout)
    return {name: parameter.detach() for name, parameter in parameters.items()}


def load(path: str, sizes: list[int]) -> dict[str, Tensor]:
    """Return this rank's parameters after one more step."""
    layout = layout_of(sizes, u_shape=True, sequence=False)
    parameters, optimizer = make(layout)
    for parameter in parameters.values():
        parameter.detach().fill_(torch.nan)
    assert load_checkpoint(path, parameters, sharded_dim=DIM, layout=layout) == {"step": 3}
    load_optimizer(path, optimizer, parameters, sharded_dim=DIM, layout=layout)
    step(parameters, optimizer, layout)
    wrong = {"layers.0.up": torch.zeros(1, 1), "layers.9.up": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"layers\.0\.up: .* must equal .*layers\.9\.up must"):
        load_checkpoint(path, wrong, sharded_dim=DIM, layout=layout)
    return {name: parameter.detach() for name, parameter in parameters.items()}


def whole(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Put the parts of all ranks together; ranks of a stage follow one another."""
    found: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, x in part.items():
            found.setdefault(name, []).append(x)
    result = {}
    for name, xs in found.items():
        dim = dim_of(name)
        result[name] = xs[0] if dim is None else torch.cat(xs, dim)
    return result


def test_any_layout_goes_on_where_another_one_stopped(tmp_path: Path) -> None:
    """Bit for bit: an elementwise optimizer does not care how tensors are cut."""
    expected: dict[str, Tensor] | None = None
    for number, (saved, loaded) in enumerate(
        (([1, 2], [2, 1]), ([2, 1], [1, 2]), ([1, 1], [1, 3]))
    ):
        path = str(tmp_path / str(number))
        went_on = whole(run_distributed(save, path, saved, world_size=sum(saved)))
        restored = whole(run_distributed(load, path, loaded, world_size=sum(loaded)))
        expected = expected or went_on
        assert sorted(restored) == sorted(expected)
        for name, x in expected.items():
            assert torch.equal(went_on[name], x), name
            assert torch.equal(restored[name], x), name


def _flipped(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def _load_with_flips(path: str, flips: list[tuple[str, int]]) -> int:
    """Load everything with one bit flipped at a time; return how often that was refused."""
    layout = PipelineLayout.straight([1])
    tensors = {
        name: torch.full(tensor.shape, 7, dtype=DTYPES[tensor.dtype])
        for name, tensor in Checkpoint.open(Path(path)).manifest.tensors.items()
    }
    before = {name: x.clone() for name, x in tensors.items()}
    refused = 0
    for name, bit in flips:
        _flipped(Path(path, name), bit)
        with pytest.raises(CheckpointError):
            load_checkpoint(path, tensors, sharded_dim=lambda _: None, layout=layout)
        refused += all(torch.equal(x, before[name]) for name, x in tensors.items())
        _flipped(Path(path, name), bit)
    load_checkpoint(path, tensors, sharded_dim=lambda _: None, layout=layout)
    return refused


def test_no_flipped_bit_loads(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    run_distributed(save, str(path), [1, 2], world_size=3)
    chance, files = random.Random(0), sorted(path.iterdir())
    weights = [file.stat().st_size for file in files]
    chosen = chance.choices(files, weights, k=150)
    flips = [(file.name, chance.randrange(8 * file.stat().st_size)) for file in chosen]
    assert len({name for name, _ in flips}) > 3
    assert run_distributed(_load_with_flips, str(path), flips, world_size=1) == [150]


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    layout = PipelineLayout.straight([1])
    with pytest.raises(CheckpointError, match=r"manifest\.sha256 is missing"):
        load_checkpoint(tmp_path, {}, sharded_dim=dim_of, layout=layout)
    (tmp_path / f"run.tmp-{32 * '0'}").mkdir()
    assert remove_unfinished(tmp_path / "run")
