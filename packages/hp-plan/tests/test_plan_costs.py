"""What stages and blocks compute, keep and exchange, against the modules themselves."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hp_base.dtypes import BYTES
from hp_plan.costs.machine import MACHINES
from hp_plan.costs.modules import kernels, stage, stages, whole_model
from hp_plan.costs.work import Work
from hp_plan.price.rates import rates_of
from hp_trainer.config import Config, ModelConfig
from hp_trainer.config.options import resolve, with_keys
from hp_trainer.layout.ranks import StageLayout
from hp_trainer.layout.schedules import split_layers
from hp_trainer.layout.vocabulary import TILE_BYTES, WIDE_BYTES
from hp_trainer.model import DropoutKey, Microbatch, TransformerStage, look_ahead
from hp_trainer.model.stage import Stage
from hp_trainer.model.transformer import build_stage

VOCAB = 256
MODELS = {
    "experts": ModelConfig(),
    "dropout": ModelConfig(dropout=0.1),
    "dense": ModelConfig(num_dense_layers=4),
    "wide": ModelConfig(
        dim=256,
        num_heads=8,
        num_kv_heads=8,
        expert_hidden=512,
        num_experts=16,
        top_k=4,
        num_shared_experts=0,
    ),
    "tied": ModelConfig(tie_embeddings=True, num_dense_layers=1),
    "qk_norm": ModelConfig(qk_norm=True, num_experts=0),
    "latent": ModelConfig(
        attention="mla",
        q_lora_rank=48,
        kv_lora_rank=32,
        nope_head_dim=16,
        rope_head_dim=8,
        v_head_dim=24,
        router_score="sigmoid",
        correction_bias=True,
        num_mtp_modules=1,
    ),
    "sinks": ModelConfig(
        attention_bias=True,
        attention_sinks=True,
        sliding_window=16,
        full_attention_every=2,
        expert_bias=True,
        router_bias=True,
        expert_activation="clamped_swiglu",
        num_shared_experts=0,
    ),
}


def config_of(keys: dict[str, Any] | None = None) -> Config:
    return resolve("quickstart", (keys or {}).items(), env={}).config


def built(model: ModelConfig, layers: range, *, first: bool, last: bool) -> TransformerStage:
    with torch.device("meta"):
        return TransformerStage(model, VOCAB, layers=layers, first=first, last=last)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("layers", "first", "last"),
    [
        (range(4), True, True),
        (range(2), True, False),
        (range(1, 3), False, False),
        (range(3, 4), False, True),
    ],
)
def test_parameters_are_those_of_the_modules(
    name: str, layers: range, first: bool, last: bool
) -> None:
    model = MODELS[name]
    work = stage(Config(model=model), VOCAB, layers=layers, first=first, last=last)
    module = built(model, layers, first=first, last=last)
    expected = {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}
    assert {weight.name: weight.shape for weight in work.weights} == expected
    experts = {weight.name for weight in work.weights if weight.spec.is_expert}
    assert experts == {name for name in expected if ".experts." in name}


@pytest.mark.parametrize("name", MODELS)
def test_stages_with_layers_of_the_same_kinds_are_one(name: str) -> None:
    config = with_keys(Config(model=MODELS[name]), {"model.num_layers": 12})
    found = stages(config, VOCAB, num_stages=6)
    assert len(set(found)) < 6
    for index, (work, layers) in enumerate(zip(found, split_layers(12, 6), strict=True)):
        own = stage(config, VOCAB, layers=layers, first=index == 0, last=index == 5)
        expected = [replace(weight, name="") for weight in own.weights]
        assert [replace(weight, name="") for weight in work.weights] == expected
        for field in fields(Work):
            if field.name != "weights":
                assert getattr(work, field.name) == getattr(own, field.name), field.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_kept_for_backward_is_within_ten_percent(name: str, dtype: torch.dtype) -> None:
    model = MODELS[name]
    sequences, length = 4, 64
    module = TransformerStage(
        model, VOCAB, layers=range(2), first=True, last=True, compute_dtype=dtype
    ).to(torch.promote_types(dtype, torch.float32))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    measured = kept_bytes(module, sequences, length, num_ahead=model.num_mtp_modules)
    keys = {"data.seq_len": length, "train.dtype": str(dtype).removeprefix("torch.")}
    config = with_keys(Config(model=model), keys)
    work = stage(config, VOCAB, layers=range(2), first=True, last=True)
    predicted = work.kept_bytes(sequences * length)
    assert predicted == pytest.approx(measured, rel=0.1)


def test_what_a_model_of_ones_own_keeps_is_within_ten_percent(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "how-to" / "add-a-model.md"
    if not page.exists():
        pytest.skip("not in a checkout")
    (tmp_path / "own.py").write_text(page.read_text().split("```python\n")[1].split("```")[0])
    model = ModelConfig(factory=f"{tmp_path}/own.py:MyStage", max_positions=64)
    built = build_stage(model, VOCAB, layers=range(4), first=True, last=True)
    module = built.to_empty(device="cpu")
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    config = with_keys(Config(model=model), {"data.seq_len": 64})
    work = whole_model(config, VOCAB)
    assert work.kept_bytes(4 * 64) == pytest.approx(kept_bytes(module, 4, 64), rel=0.1)
    assert {weight.name for weight in work.weights} == dict(module.named_parameters()).keys()
    matrices = sum(w.size for w in work.weights if len(w.shape) == 2 and "router" not in w.name)
    dense = 2 * (matrices - 64 * model.dim - VOCAB * model.dim)  # but for both tables
    experts = 4 * 6 * model.top_k * model.dim * model.expert_hidden
    routers = 4 * 2 * model.dim * model.num_experts
    attention = 4 * 4 * 32 * model.dim
    assert work.flops == pytest.approx(dense + experts + routers + attention)


def kept_bytes(module: Stage, sequences: int, length: int, *, num_ahead: int = 0) -> int:
    """Bytes that autograd keeps from a forward, parameters apart."""
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage  # held, so that no other gets its address
        return tensor

    tokens = torch.randint(VOCAB, (sequences, length))
    key = DropoutKey(0, 0, torch.arange(sequences), torch.arange(length))
    ahead = look_ahead(tokens, tokens, (tokens.numel(),) * num_ahead)
    microbatch = Microbatch(sequences, key, ahead=ahead)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = module(tokens, microbatch=microbatch)
        wide = torch.promote_types(logits.dtype, torch.float32)
        F.cross_entropy(logits.flatten(0, 1).to(wide), tokens.flatten(), reduction="sum")
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(("name", "widths"), [("wide", 32 + 32), ("latent", 24 + 8)])
def test_operations_are_two_per_weight_that_a_token_meets_and_those_of_attention(
    name: str, widths: int
) -> None:
    # Of a head, the width of keys and that of values: they differ where attention is latent.
    model = msgspec.structs.replace(MODELS[name], num_mtp_modules=0, v_head_dim=8)
    work = whole_model(with_keys(Config(model=model), {"data.seq_len": 64}), VOCAB)
    met = 0.0
    for weight in work.weights:
        if weight.name == "embedding.weight" or len(weight.shape) == 1:
            continue
        met += weight.size * (model.top_k / model.num_experts if weight.spec.is_expert else 1)
    seen = 64 / 2
    attention = model.num_layers * 2 * seen * model.num_heads * widths
    assert work.flops == pytest.approx(2 * met + attention)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_that_cut_matrices_keep_all_positions_of_what_they_gather(dtype: str) -> None:
    config = config_of({"model.num_experts": 0, "mesh.ep": 1, "train.dtype": dtype})
    block = stage(config, VOCAB, layers=range(1), first=False, last=False)
    gathered = 2 * config.model.dim * BYTES[config.train.dtype]  # by attention and feed-forward
    assert block.kept_bytes(1, tp=2) == block.kept_bytes(1) / 2 + gathered


@pytest.mark.parametrize(("dropout", "again"), [(0.0, 1), (0.1, 2)])
def test_dropout_at_the_end_of_a_layer_needs_its_last_sum_again(dropout: float, again: int) -> None:
    keys = {"model.num_experts": 0, "model.dropout": dropout, "train.recompute": "full"}
    config = config_of(keys | {"mesh.ep": 1})
    block = stage(config, VOCAB, layers=range(1), first=False, last=False)
    assert block.again is not None
    assert block.summed == 2 * config.model.dim
    assert block.again.summed == again * config.model.dim


@pytest.mark.parametrize("name", MODELS)
def test_kernels_multiply_as_often_as_the_model_and_twice_in_backward(name: str) -> None:
    keys = {"data.seq_len": 64, "train.dtype": "bfloat16", "train.recompute": "full"}
    config = with_keys(Config(model=MODELS[name]), keys)
    (found,) = kernels(config, VOCAB, num_stages=1)
    forward, backward, again = (
        sum(times * kernel.flops for kernel, times in way.items()) for way in found
    )
    work = whole_model(config, VOCAB)
    assert forward == pytest.approx(work.flops)
    # FlashAttention computes scores again: five products for two.
    attention = sum(
        times * kernel.flops
        for kernel, times in found.forward.items()
        if kernel.kind == "attention"
    )
    apart = 0.02 if config.model.attention_sinks else 1e-6  # what a sink adds to a backward
    assert backward == pytest.approx(2 * forward + attention / 2, rel=apart)
    assert work.again is not None
    assert again == pytest.approx(work.again.flops)


def test_kernels_of_a_loss_that_goes_in_tiles_from_three_sequences_on_are_learned() -> None:
    tokens = 128
    vocab_size = TILE_BYTES // WIDE_BYTES // tokens * 2 // 5  # two sequences take 4/5 of a tile
    keys = {"data.seq_len": tokens, "train.dtype": "bfloat16"}
    config = with_keys(Config(model=MODELS["qk_norm"]), keys)
    (found,) = kernels(config, vocab_size, num_stages=1)
    forward = sum(times * kernel.flops for kernel, times in found.forward.items())
    assert forward == pytest.approx(whole_model(config, vocab_size).flops, rel=0.02)


@pytest.mark.parametrize("recompute", ["none", "attention", "feed_forward"])
def test_kernels_that_run_again_are_those_of_the_part(recompute: str) -> None:
    keys = {"data.seq_len": 64, "train.dtype": "bfloat16", "train.recompute": recompute}
    config = with_keys(Config(model=MODELS["latent"]), keys)
    (found,) = kernels(config, VOCAB, num_stages=1)
    again = sum(times * kernel.flops for kernel, times in found.again.items())
    work = whole_model(config, VOCAB)
    assert again == pytest.approx(0.0 if work.again is None else work.again.flops)


def test_kernels_of_experts_read_weights_once_however_many_tokens_there_are() -> None:
    model = MODELS["wide"]
    config = with_keys(Config(model=model), {"data.seq_len": 64, "train.dtype": "bfloat16"})
    (found,) = kernels(config, VOCAB, num_stages=1)
    grouped = [(k, times) for k, times in found.forward.items() if k.kind == "grouped"]
    assert all(kernel.is_expert for kernel, _ in grouped)
    read = sum(times * kernel.fixed_bytes for kernel, times in grouped)
    weights = 3 * model.num_layers * model.num_experts * model.dim * model.expert_hidden
    assert read == pytest.approx(2 * weights, rel=1e-3)  # and where each expert's rows begin


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_experts_in_full_precision_are_products_that_are_shared_out(dtype: str) -> None:
    model = MODELS["experts"]
    config = with_keys(Config(model=model), {"data.seq_len": 64, "train.dtype": dtype})
    (found,) = kernels(config, VOCAB, num_stages=1)
    forward, backward = (
        [(k, t) for k, t in way.items() if k.kind == "product" and k.is_expert] for way in found[:2]
    )
    number = 3 * model.num_layers * model.num_experts
    operations = 6 * model.num_layers * model.top_k * model.dim * model.expert_hidden
    for way, times in ((forward, 1), (backward, 2)):
        assert sum(n * kernel.launches for kernel, n in way) == times * number
        assert sum(n * kernel.flops for kernel, n in way) == times * operations
    machine = MACHINES["h100"].with_values(launch_seconds=1.0)
    rates = rates_of(machine, is_compiled=False, slowed=1.0)
    alone, shared = (rates.compute(found, 64, StageLayout(ep=ep)).host for ep in (1, 2))
    assert alone - shared == pytest.approx(3 * number / 2)  # with those of both gradients


def test_only_routed_experts_are_shared_out_as_experts_are() -> None:
    model = MODELS["experts"]
    config = with_keys(Config(model=model), {"data.seq_len": 64, "train.dtype": "bfloat16"})
    (found,) = kernels(config, VOCAB, num_stages=1)
    dense = [(k, t) for k, t in found.forward.items() if k.kind == "product"]
    assert not any(kernel.is_expert for kernel, _ in dense)
    assert not any(kernel.is_expert for kernel in found.forward if kernel.kind == "attention")
    # Weights of attention, routers, shared experts and the output, each read once.
    weights = [w for w in whole_model(config, VOCAB).weights if not w.spec.is_expert]
    read = sum(times * kernel.fixed_bytes for kernel, times in dense)
    matrices = sum(w.size for w in weights if len(w.shape) == 2 and w.name != "embedding.weight")
    assert read == pytest.approx(2 * matrices, rel=0.05)  # a router computes in float32
