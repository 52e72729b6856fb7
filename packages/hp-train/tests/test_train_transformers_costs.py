"""What `hp plan` prices of models of transformers, beside what ranks do."""

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="of `nox -s transformers`")

from integration_tests.models.architectures.tiny import Tiny

from hp_plan.costs import meta_run, modules
from hp_plan.costs.machine import MACHINES
from hp_plan.costs.memory import static_memory
from hp_plan.layouts.choose import plan_axes
from hp_plan.price.traffic import activation_transfers
from hp_platform.testing import run_distributed
from hp_train.cli import main
from hp_trainer.config import ModelConfig
from hp_trainer.config.options import build
from hp_trainer.config.transformers_folder import shape_of_folder
from hp_trainer.layout.ranks import Layout
from hp_trainer.model import DropoutKey, Microbatch, Spreading
from hp_trainer.model.transformer import build_stage
from hp_transformers.stages import tensor_parallel

pytestmark = pytest.mark.filterwarnings("default")  # of transformers

_FIELDS: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
S = 32


def folder_of(kind: str, folder: Path, **fields: Any) -> Path:
    from transformers import AutoConfig  # noqa: PLC0415 - of those who have it

    AutoConfig.for_model(kind, **{**_FIELDS, **fields}).save_pretrained(folder)
    return folder


def config_of(folder: Path, **keys: Any) -> Any:
    values = {"model.transformers": str(folder), "data.seq_len": S, "train.dtype": "float32"}
    values |= {key.replace("__", "."): value for key, value in keys.items()}
    return build(values | {key: value for key, value, _ in shape_of_folder(values)})


@pytest.fixture(name="config")
def config_(tmp_path: Path) -> Any:
    """A model with experts, of two tensor-parallel ranks."""
    return config_of(folder_of("qwen3_moe", tmp_path / "model"), mesh__tp=2)


def exchanged(model: ModelConfig) -> tuple[int, int]:
    """Elements that a rank of two puts together in forward and backward, and its parameters."""
    group, found = dist.group.WORLD, []
    stage = build_stage(
        model, 96, layers=range(2), first=True, last=True, compute_dtype=torch.float32
    )
    assert isinstance(stage, Spreading)
    assert group is not None
    stage.expect_ranks({"tp": 2, "ep": 1, "cp": 1})
    stage.cut(range(96), group)
    stage.to_empty(device="cpu")
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    gather, add = tensor_parallel._gather, tensor_parallel._sum

    def gathered(x: torch.Tensor, *args: Any) -> torch.Tensor:
        found.append(2 * x.numel())
        return gather(x, *args)

    def summed(x: torch.Tensor, *args: Any) -> torch.Tensor:
        found.append(2 * x.numel())  # scattered and gathered
        return add(x, *args)

    tokens = torch.zeros(1, S, dtype=torch.int64)
    key = DropoutKey(0, 0, torch.arange(1), torch.arange(S))
    with (
        patch.object(tensor_parallel, "_gather", gathered),
        patch.object(tensor_parallel, "_sum", summed),
    ):
        stage(tokens, microbatch=Microbatch(1, key, targets=tokens)).backward()
    return sum(found), sum(p.numel() for p in stage.parameters())


def test_exchanges_and_parameters_are_those_of_a_tensor_parallel_rank(config: Any) -> None:
    elements, parameters = run_distributed(partial(exchanged, config.model), world_size=2)[0]

    (work,) = modules.stages(config, 96, num_stages=1)
    place = Layout.of(config.mesh).stages[0]
    ways = [
        activation_transfers(config, [work], place, MACHINES["cpu"], tokens=S, backward=backward)
        for backward in (False, True)
    ]
    # Of two ranks each sends half of what is put together; gradients of norms are no tokens'.
    sent = sum(each.bytes for way in ways for each in way)
    assert sent == pytest.approx(elements / 2 * 4, rel=0.005)
    assert static_memory(config, [work], place)[0] == parameters * 4


def test_half_of_what_is_cut_is_computed_by_each_of_two_ranks(tmp_path: Path) -> None:
    model = config_of(folder_of("llama", tmp_path / "model")).model
    run = partial(meta_run.run, model, 96, seq_len=S, dtype="float32")
    whole, two = (run(sizes={"tp": tp, "ep": 1}) for tp in (1, 2))
    # All of a layer is cut; the output matrix is not, and prices divide by the number of ranks.
    assert two.blocks["layers.0"].feed.flops == whole.blocks["layers.0"].feed.flops
    assert two.loss.flops == 2 * whole.loss.flops
    assert two.blocks["layers.0"].feed.kept > whole.blocks["layers.0"].feed.kept


def test_experts_are_rows_that_travel(config: Any) -> None:
    (work,) = modules.stages(config, 96, num_stages=1)
    routed = 2 * 3 * 16 * 32  # two experts of a token, gate, up and down
    shared = config_of(Path(config.model.transformers), mesh__ep=2, mesh__dp_shard=2)
    (spread,) = modules.stages(shared, 96, num_stages=1)
    assert work.rows == spread.rows == 2 * 2
    assert spread.routed == 2 * 2 * 2 * 16 * 4  # two layers, two experts, gate and up, float32
    dense = 2 * 32 * 32 + 2 * 16 * 32 + 4 * 32  # attention, router
    assert spread.flops - spread.scores == 2 * (2 * (routed + dense) + 32 * 96)
    experts = [weight for weight in spread.weights if weight.spec.is_expert]
    assert len(experts) == 2 * 2
    assert not any(weight.spec.is_expert for weight in work.weights)


@pytest.mark.parametrize(
    ("kind", "axis", "sizes"),
    [
        ("qwen3_moe", "tp", (1, 2, 4)),
        ("qwen3_moe", "ep", (1, 2, 4)),
        ("qwen3_moe", "pp", (1, 2, 4)),
        ("gpt_oss", "ep", (1,)),  # its weights are transposed
        ("gpt_oss", "tp", (1, 2, 4)),
        ("roformer", "pp", (1,)),  # layers read what comes from in front of them
    ],
)
def test_a_plan_has_sizes_that_the_model_can_be_cut_over(
    kind: str, axis: str, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    Tiny(kind).config.save_pretrained(tmp_path / "model")
    config = config_of(tmp_path / "model", model__vocab_size=64)
    (found,) = (each.values for each in plan_axes(config, 4) if each.key == f"mesh.{axis}")
    assert found == sizes


def test_layers_have_a_price_on_a_machine_that_launches_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = []
    for layers in (2, 8):
        folder = folder_of("qwen3_moe", tmp_path / f"{layers}", num_hidden_layers=layers)
        told = ["--model.transformers", str(folder), "--data.seq_len", "64", "--json"]
        told += ("--train.dtype", "bfloat16", "--gpus", "2", "--machine", "h100", "--top", "1")
        assert main(["plan", *told]) == 0
        seconds.append(json.loads(capsys.readouterr().out)["best"][0]["parts"]["compute"])
    assert seconds[1] > 2 * seconds[0]


def test_a_dry_run_has_experts_in_float32_where_ranks_share_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of("qwen3_moe", tmp_path / "model", vocab_size=320)
    told = ("--model.transformers", str(folder), "--data.seq_len", "32", "--train.dtype", "float32")
    layout = ("--mesh.dp_shard", "2", "--mesh.ep", "2", "--train.global_batch_size", "8")
    assert main(["dry-run", *told, *layout]) == 0
    assert "no problems between ranks" in capsys.readouterr().out
