"""Checkpoints of hp-train beside what families of Hugging Face publish and what engines fuse."""

import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from hp_checkpoint.runs import save_checkpoint
from hp_platform.testing import run_distributed
from hp_train.published_names import published
from hp_train.verify.own_trainer import listen
from hp_trainer.config import ModelConfig, to_dict
from hp_trainer.config.options import resolve, shipped
from hp_trainer.model.transformer import model_shapes
from hp_transformers.families import save_weights
from hp_verify import compare_checkpoints
from hp_verify.cli import main as hp_verify

Tensors = dict[str, Tensor]


def test_the_command_hp_verify_finds_what_this_package_knows() -> None:
    found = {
        point.name: point.load()
        for group in ("hp_verify.names", "hp_verify.trainers")
        for point in entry_points(group=group)
    }
    assert found == {"hugging_face": published, "hp_trainer.training.trainer": listen}


def saved(path: Path, tensors: Tensors) -> Path:
    path.mkdir()
    save_file(tensors, str(path / "model.safetensors"))
    return path


def random_tensors(model: ModelConfig) -> Tensors:
    """Random values for every tensor of a model of hp-train, exact in bfloat16."""
    g = torch.Generator().manual_seed(0)
    shapes = model_shapes(model).items()
    return {name: torch.randn(shape, generator=g).bfloat16().float() for name, shape in shapes}


def rank_saves(run: Path, preset: str) -> None:
    """Save a model of hp-train as a run does, with its name, moments and config."""
    config = resolve(preset, env={}).config
    group = dist.group.WORLD
    assert group is not None
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors: Tensors = {}
    for name, tensor in random_tensors(small(config.model)).items():
        is_cut = tensor.ndim > 0 and tensor.shape[0] % 2 == 0
        placements: list[Placement] = [Shard(0) if is_cut else Replicate()]
        tensors[f"model.{name}"] = distribute_tensor(tensor, mesh, placements)
        tensors[f"optimizer.exp_avg.{name}"] = distribute_tensor(tensor / 2, mesh, placements)
    save_checkpoint(
        run / "checkpoints",
        step=3,
        tensors=tensors,
        extra={"config": to_dict(config)},
        group=group,
        keep=1,
    )


def small(model: ModelConfig) -> ModelConfig:
    return replace(model, vocab_size=40, max_positions=64)


@pytest.mark.sample("debug-gpt-oss", "debug-qwen3-moe")
@pytest.mark.parametrize("preset", [name for name in shipped() if name.startswith("debug-")])
def test_a_run_is_found_in_what_a_family_publishes(preset: str, tmp_path: Path) -> None:
    model = small(resolve(preset, env={}).config.model)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    run_distributed(rank_saves, tmp_path / "run", preset, world_size=2)
    tensors = random_tensors(model)
    save_weights(tmp_path / "theirs", tensors, model, dtype=torch.float32)
    name = next(n for n in tensors if n.endswith(("wq.weight", "wq_a.weight")))
    tensors[name][1, 2] += 1.0
    save_weights(tmp_path / "wrong", tensors, model, dtype=torch.float32)

    found = compare_checkpoints(tmp_path / "run", tmp_path / "theirs")

    assert found.is_equal, found
    assert found.counts["equal"] > 20
    assert "state of the optimizer is in" in found.notes[0]
    [difference] = compare_checkpoints(tmp_path / "run", tmp_path / "wrong").differences
    assert "1 of " in difference.said
    assert compare_checkpoints(tmp_path / "run", tmp_path / "run").is_equal
    command = ["--checkpoint", str(tmp_path / "theirs"), str(tmp_path / "run")]
    assert hp_verify(command) == 0


def test_an_engine_has_what_a_run_of_hp_train_saved(tmp_path: Path) -> None:
    preset = "debug-qwen3-moe"
    model = small(resolve(preset, env={}).config.model)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    run_distributed(rank_saves, tmp_path / "run", preset, world_size=2)
    save_weights(tmp_path / "published", random_tensors(model), model, dtype=torch.float32)
    given = load_file(tmp_path / "published" / "model-00001-of-00001.safetensors")
    fused: Tensors = {}
    for name, tensor in given.items():
        if ".experts." not in name and not re.search(r"[qkv]_proj", name):
            fused[name] = tensor.bfloat16()
    for layer in {n.split(".self_attn")[0] for n in given if ".self_attn" in n}:
        parts = [given[f"{layer}.self_attn.{p}_proj.weight"] for p in "qkv"]
        fused[f"{layer}.self_attn.qkv_proj.weight"] = torch.cat(parts).bfloat16()
        experts = [f"{layer}.mlp.experts.{i}" for i in range(model.num_experts)]
        if f"{experts[0]}.up_proj.weight" not in given:
            continue
        ups = [torch.cat([given[f"{e}.{n}_proj.weight"] for n in ("gate", "up")]) for e in experts]
        fused[f"{layer}.mlp.experts.w13_weight"] = torch.stack(ups).bfloat16()
        downs = torch.stack([given[f"{e}.down_proj.weight"] for e in experts])
        fused[f"{layer}.mlp.experts.w2_weight"] = downs.bfloat16()
    engines = saved(tmp_path / "engine", fused)

    found = compare_checkpoints(tmp_path / "run", engines)

    assert found.is_equal, found
    assert found.made["experts stacked"] > 1
    swapped = "model.layers.1.mlp.experts.w13_weight"
    fused[swapped] = fused[swapped].roll(fused[swapped].shape[1] // 2, dims=1)
    wrong = saved(tmp_path / "wrong", fused)
    assert [d.name for d in compare_checkpoints(tmp_path / "run", wrong).differences] == [swapped]
