"""Models of Hugging Face's transformers over ranks give what they give in one process.

The tests need `transformers`, which no session installs by itself (`nox -s transformers`).
"""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from hp_expert import (
    AllToAllDispatcher,
    apply_to_transformers,
    clip_grad_norm_,
    expert_names,
    expert_parameter_names,
    load_experts,
    reduce_expert_gradients,
    register_with_transformers,
    save_experts,
    save_routing,
    to_hf,
)
from hp_platform import PeerError
from hp_platform.testing import RankError, compare, run_distributed, run_in_threads

pytestmark = pytest.mark.usefixtures("one_thread")

transformers = pytest.importorskip("transformers")

EXPERTS, CHOICES = 8, 2
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
LOCAL = {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOICES}
NUMBERED = {"num_experts": EXPERTS, "num_experts_per_tok": CHOICES, "moe_intermediate_size": 12}
ROUTED = {
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": CHOICES,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
}
FULL = {"layer_types": ["full_attention"] * 2}
# Each row of the table in docs/how-to/spread-experts-of-transformers.md: class, configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("DeepseekV2", ROUTED | LATENT),
    "deepseek_v3": ("DeepseekV3", ROUTED | LATENT),
    "dots1": ("Dots1", ROUTED | {"n_shared_experts": 1}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 12, "moe_layer_start_index": 0},
    ),
    "flex_olmo": ("FlexOlmo", NUMBERED),
    "glm4_moe": ("Glm4Moe", ROUTED | {"head_dim": 8, "n_group": 1, "topk_group": 1}),
    "granitemoe": ("GraniteMoe", LOCAL),
    "granitemoeshared": ("GraniteMoeShared", LOCAL | {"shared_intermediate_size": 12}),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {"num_experts": 8, "moe_topk": 2, "head_dim": 8}),
    "jamba": (
        "Jamba",
        NUMBERED
        | {"use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 0}
        | {"expert_layer_period": 1, "expert_layer_offset": 0},
    ),
    "lfm2_moe": ("Lfm2Moe", NUMBERED | FULL | {"num_dense_layers": 1}),
    "minimax_m2": ("MiniMaxM2", LOCAL | {"head_dim": 8, "rotary_dim": 4}),
    "mixtral": ("Mixtral", LOCAL | {"output_router_logits": True}),
    "olmoe": ("Olmoe", NUMBERED),
    "phimoe": ("Phimoe", LOCAL),
    "qwen2_moe": ("Qwen2Moe", NUMBERED | {"shared_expert_intermediate_size": 12}),
    "qwen3_moe": ("Qwen3Moe", NUMBERED | {"head_dim": 8, "output_router_logits": True}),
    "qwen3_next": (
        "Qwen3Next",
        NUMBERED | FULL | {"head_dim": 8, "shared_expert_intermediate_size": 12},
    ),
}
REFUSED = {
    "GptOss": (LOCAL | {"head_dim": 8}, "GptOssExperts.*its weights are transposed"),
    "Llama4": (LOCAL | {"head_dim": 8, "intermediate_size_mlp": 24}, "Llama4TextExperts"),
    "Llama": ({}, "must have layers with experts"),
}

Tensors = dict[str, Tensor]


def build(name: str, *, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """The same model in every rank, which may be a thread of this process."""
    kind, config = MODELS[name]
    return make(kind, config, dtype=dtype, **changes)


def make(kind: str, config: dict[str, Any], *, dtype: torch.dtype, **changes: Any) -> Any:
    configuration = getattr(transformers, f"{kind}Config", None)
    if configuration is None or kind == "Llama4":
        configuration = transformers.Llama4TextConfig
    model = getattr(transformers, f"{kind}ForCausalLM")(configuration(**SIZES | config | changes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(drawn / 4)
    # Phimoe chooses at random in training.
    return model.to(dtype).train(kind != "Phimoe")


def tokens(rank: int, *, seed: int = 0) -> Tensor:
    """Every rank has other tokens, and another number of them."""
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return torch.randint(3, 64, (2, 5 + rank), generator=generator)


def step(model: Any, rank: int) -> Tensors:
    """Logits, auxiliary loss and all gradients; the loss of a model has its balance loss in it."""
    out = model(input_ids=tokens(rank), labels=tokens(rank), use_cache=False)
    out.loss.backward()
    found = {f"logits{rank}": out.logits.detach()}
    return found | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def is_of_experts(name: str) -> bool:
    return name.endswith(("experts.gate_up_proj", "experts.down_proj"))


def together(results: list[Tensors]) -> Tensors:
    """Tensors of all ranks: experts one after the other, other gradients summed."""
    whole: Tensors = {}
    for name in {name for result in results for name in result}:
        parts = [result[name] for result in results if name in result]
        whole[name] = torch.cat(parts) if is_of_experts(name) else torch.stack(parts).sum(0)
    return whole


def accumulated(name: str, world_size: int, **changes: Any) -> Tensors:
    model = build(name, **changes)
    found: Tensors = {}
    for rank in range(world_size):
        found |= step(model, rank)
    return found


def assert_same(actual: Tensors, wanted: Tensors, bound: float = 1e-12) -> None:
    comparison = compare(actual, wanted, bound=bound)
    assert comparison.ok, str(comparison)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_equal_one_process(name: str) -> None:
    """fp64; routers that compute in fp32 do so on both sides."""

    def rank_main(group: dist.ProcessGroup) -> Tensors:
        return step(apply_to_transformers(build(name), group), group.rank())

    assert_same(together(run_in_threads(rank_main, world_size=2)), accumulated(name, 2))


def on_a_mesh(name: str) -> Tensors:
    model = build(name)
    apply_to_transformers(model, init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    for parameter_name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) == is_of_experts(parameter_name)
        if isinstance(parameter, DTensor):
            assert parameter.placements == (Shard(0),)
            assert parameter.shape[0] == EXPERTS
    found = step(model, dist.get_rank())
    return {n: t.to_local() if isinstance(t, DTensor) else t for n, t in found.items()}


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_on_a_mesh_parameters_and_gradients_are_sharded_tensors(name: str) -> None:
    assert_same(together(run_distributed(on_a_mesh, name, world_size=2)), accumulated(name, 2))


def under_fsdp(name: str) -> Tensors:
    """Experts over "ep", and what is left of their parameters over "dp"; gradients of experts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = apply_to_transformers(build(name), mesh["ep"])
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mesh=mesh["dp"])
    found = step(model, dist.get_rank())
    # FSDP2 averages over "dp".
    return {n: 2 * t.full_tensor() for n, t in found.items() if isinstance(t, DTensor)}


def beside_data_parallelism(name: str) -> tuple[float, Tensors]:
    """Experts on plain groups; the mean over the ranks' losses; norm and gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    ep = mesh["ep"].get_group()
    model = apply_to_transformers(build(name), ep)
    names = expert_parameter_names(model)
    assert {n for n, _ in model.named_parameters() if is_of_experts(n)} == set(names)
    step(model, dist.get_rank())
    reduce_expert_gradients(model, replicas=mesh["dp"], divide_by=4)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name not in names and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= 4
    norm = clip_grad_norm_(model, 0.01)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return float(norm), {n: g for n, g in gradients.items() if ep.rank() or n in names}


def test_gradients_beside_data_parallelism_are_averaged_measured_and_clipped() -> None:
    model = build("mixtral")
    for rank in range(4):
        step(model, rank)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= 4
    expected = float(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    found = run_distributed(beside_data_parallelism, "mixtral", world_size=4)
    assert [norm for norm, _ in found] == pytest.approx([expected] * 4, rel=1e-12)
    assert_same(together([gradients for _, gradients in found[:2]]), wanted)


def test_fsdp_over_another_axis_has_the_same_gradients() -> None:
    wanted = {n: t for n, t in accumulated("mixtral", 4).items() if is_of_experts(n)}
    assert len(wanted) == 4
    for actual in run_distributed(under_fsdp, "mixtral", world_size=4):
        assert_same(actual, wanted)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_fp32_differs_by_rounding_alone(name: str) -> None:
    def rank_main(group: dist.ProcessGroup) -> Tensors:
        model = apply_to_transformers(build(name, dtype=torch.float32), group)
        return step(model, group.rank())

    actual = together(run_in_threads(rank_main, world_size=2))
    assert_same(actual, accumulated(name, 2, dtype=torch.float32), bound=1e-5)


def test_bf16_logits_are_near_those_of_one_process() -> None:
    def rank_main(group: dist.ProcessGroup) -> Tensors:
        model = apply_to_transformers(build("mixtral", dtype=torch.bfloat16), group)
        return step(model, group.rank())

    actual = together(run_in_threads(rank_main, world_size=2))
    wanted = accumulated("mixtral", 2, dtype=torch.bfloat16)
    logits = [f"logits{rank}" for rank in range(2)]
    assert_same({n: actual[n] for n in logits}, {n: wanted[n] for n in logits}, bound=3e-2)


def test_each_rank_keeps_its_experts_in_storage_of_its_own() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        model = build("qwen3_moe", dtype=torch.float32)
        whole = model.model.layers[0].mlp.experts.down_proj.detach().clone()
        kind = type(model.model.layers[0].mlp.experts)
        apply_to_transformers(model, group)
        experts = model.model.layers[0].mlp.experts
        assert isinstance(experts, kind)
        assert torch.equal(experts.down_proj, whole.chunk(4)[group.rank()])
        assert experts.down_proj.untyped_storage().nbytes() == experts.down_proj.nbytes
        assert experts.first_expert == 2 * group.rank()

    run_in_threads(rank_main, world_size=4)


def test_a_model_on_the_meta_device_is_spread_without_memory() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        _, config = MODELS["qwen3_moe"]
        with torch.device("meta"):
            model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES | config))
        apply_to_transformers(model, group)
        down = model.model.layers[0].mlp.experts.down_proj
        assert (down.device.type, down.shape[0]) == ("meta", EXPERTS // 2)

    run_in_threads(rank_main, world_size=2)


def test_parameters_that_layers_share_stay_shared() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        model = build("mixtral", tie_word_embeddings=True)
        first, second = (layer.mlp.experts for layer in model.model.layers)
        second.down_proj = first.down_proj
        apply_to_transformers(model, group)
        assert second.down_proj is first.down_proj
        assert model.lm_head.weight is model.model.embed_tokens.weight

    run_in_threads(rank_main, world_size=2)


def test_what_is_frozen_stays_frozen_and_a_copy_computes_the_same() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        model = build("qwen3_moe").eval()
        model.model.layers[0].mlp.experts.requires_grad_(False)
        apply_to_transformers(model, group)
        experts = model.model.layers[0].mlp.experts
        assert not any(p.requires_grad for p in experts.parameters())
        twin = copy.deepcopy(model)
        assert twin.model.layers[0].mlp.experts.dispatcher == experts.dispatcher
        ids = tokens(group.rank())
        with torch.no_grad():
            assert torch.equal(twin(ids).logits, model(ids).logits)

    run_in_threads(rank_main, world_size=2)


@pytest.mark.parametrize("saves", [False, True])
def test_recomputed_layers_have_the_same_gradients(saves: bool) -> None:
    def rank_main(group: dist.ProcessGroup) -> Tensors:
        model = apply_to_transformers(build("mixtral"), group)
        keywords = {"use_reentrant": False} | ({"context_fn": save_routing} if saves else {})
        model.activation_checkpointing_enable(keywords)
        return step(model, group.rank())

    assert_same(together(run_in_threads(rank_main, world_size=2)), accumulated("mixtral", 2))


def generated(name: str) -> list[Tensor]:
    """Prompts of other lengths, so that one rank would be done before the other."""
    rank = dist.get_rank()
    model = apply_to_transformers(build(name).eval(), dist.group.WORLD)
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ids = model.generate(tokens(rank), max_new_tokens=3 + 2 * rank, synced_gpus=True, **options)
    alone = build(name).eval().generate(tokens(rank), max_new_tokens=3 + 2 * rank, **options)
    return [ids, alone]


def test_generation_gives_the_tokens_of_one_process() -> None:
    for ids, alone in run_distributed(generated, "qwen3_moe", world_size=2):
        assert torch.equal(ids, alone)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "granitemoe"])
def test_a_single_process_selects_this_package_in_the_registry(name: str) -> None:
    register_with_transformers()
    model = build(name, experts_implementation="hp_expert")
    assert model.config._experts_implementation == "hp_expert"
    assert_same(step(model, 0), accumulated(name, 1))


def test_the_registry_refuses_experts_that_it_cannot_compute() -> None:
    register_with_transformers()
    model = make(
        "GptOss",
        REFUSED["GptOss"][0],
        dtype=torch.float32,
        experts_implementation="hp_expert",
    )
    with pytest.raises(ValueError, match=r"GptOssExperts cannot be computed.*transposed"):
        model(tokens(0))


def test_without_ranks_all_experts_stay_here() -> None:
    model = build("mixtral")
    before = model.model.layers[0].mlp.experts.down_proj
    assert apply_to_transformers(model) is model
    assert model.model.layers[0].mlp.experts.down_proj is before
    assert_same(step(model, 0), accumulated("mixtral", 1))


# The compiler looks at the gradients of activations.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_model_computes_the_same() -> None:
    model = apply_to_transformers(build("mixtral", dtype=torch.float32, num_hidden_layers=1))
    compiled: Any = torch.compile(model, backend="eager")
    for rank in (0, 1):
        out = compiled(input_ids=tokens(rank), use_cache=False)
        assert torch.equal(out.logits, model(input_ids=tokens(rank), use_cache=False).logits)


def test_autocast_reaches_the_experts() -> None:
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = build("mixtral", dtype=torch.float32)(tokens(0)).logits
        model = apply_to_transformers(build("mixtral", dtype=torch.float32))
        actual = model(tokens(0)).logits
    assert actual.dtype == expected.dtype == torch.bfloat16
    assert_same({"logits": actual}, {"logits": expected}, bound=3e-2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_under_autocast_experts_are_summed_in_fp32_as_by_transformers(world_size: int) -> None:
    theirs = build("mixtral", dtype=torch.float32).model.layers[0].mlp.experts
    torch.manual_seed(1)
    x, chosen = torch.randn(40, 16), torch.rand(40, EXPERTS).topk(CHOICES).indices
    weights = torch.rand(40, CHOICES).softmax(-1)

    def by(implementation: str, experts: Any, rows: Tensor) -> Tensor:
        experts.config._experts_implementation = implementation
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            return torch.as_tensor(experts(rows, chosen, weights))

    def rank_main(group: dist.ProcessGroup) -> Tensor:
        model = nn.ModuleDict({"experts": copy.deepcopy(theirs)})
        apply_to_transformers(model, group if world_size > 1 else None)
        return by("eager", model["experts"], x)

    found = run_in_threads(rank_main, world_size=world_size)
    # On a CPU autocast leaves their grouped products alone, so that path gets bf16 as it is.
    narrow = copy.deepcopy(theirs).to(torch.bfloat16)
    grouped = by("grouped_mm", narrow, x.to(torch.bfloat16)).float()
    eager = by("eager", theirs, x)
    size = eager.norm()
    for ours in found:
        assert ours.dtype == eager.dtype == torch.float32
        assert not torch.equal(ours, ours.to(torch.bfloat16).float())
        # Between ranks the sum of a rank's experts travels in bf16, rounded once.
        assert (ours - eager).norm() / size < (1e-6 if world_size == 1 else 4e-3)
        assert (ours.to(torch.bfloat16).float() - grouped).norm() / size < 4e-3


def test_another_dispatcher_can_carry_the_rows() -> None:
    def rank_main(group: dist.ProcessGroup) -> Tensors:
        def plain(group: dist.ProcessGroup, num_experts: int) -> Any:
            return AllToAllDispatcher(group, num_experts, deduplicate=False)

        model = apply_to_transformers(build("mixtral"), group, dispatcher=plain)
        assert model.get_submodule("model.layers.0.mlp.experts").dispatcher.deduplicate is False
        return step(model, group.rank())

    assert_same(together(run_in_threads(rank_main, world_size=2)), accumulated("mixtral", 2))


@pytest.mark.parametrize("kind", ["GptOss", "Llama4", "Llama"])
def test_models_that_cannot_be_computed_are_refused_with_the_reason(kind: str) -> None:
    config, reason = REFUSED[kind]

    def rank_main(group: dist.ProcessGroup) -> None:
        model = make(kind, config, dtype=torch.float32)
        with pytest.raises(ValueError, match=reason):
            apply_to_transformers(model, group)

    run_in_threads(rank_main, world_size=2)


def gelu(model: Any) -> None:
    model.model.layers[1].mlp.experts.act_fn = nn.GELU()


def float8(model: Any) -> None:
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = nn.Parameter(
        experts.down_proj.detach().to(torch.float8_e4m3fn), requires_grad=False
    )


def scaled(model: Any) -> None:
    model.model.layers[1].mlp.experts.down_proj_scale_inv = nn.Parameter(torch.ones(EXPERTS, 1, 1))


def transposed(model: Any) -> None:
    model.model.layers[1].mlp.experts.is_transposed = True


def spread_already(model: Any) -> None:
    model.model.layers[1].mlp.experts._is_expert_parallel = True


def hooked_experts(model: Any) -> None:
    """As accelerate does it for models on several devices."""
    experts = model.model.layers[1].mlp.experts
    experts.forward = partial(experts.forward)


def hooked_block(model: Any) -> None:
    block = model.model.layers[1].mlp
    block.forward = partial(block.forward)


def seven(model: Any) -> None:
    experts = model.model.layers[1].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        setattr(experts, name, nn.Parameter(getattr(experts, name).detach()[:7]))
    experts.num_experts = 7


CHANGES: list[tuple[Callable[[Any], None], str]] = [
    (gelu, r"layers\.1\.mlp\.experts \(MixtralExperts\).*GELU.*must be silu"),
    (float8, r"quantised \(\{'down_proj': torch\.float8_e4m3fn\}\)"),
    (scaled, r"quantised \(\['down_proj_scale_inv'\]\)"),
    (transposed, "its weights are transposed"),
    (spread_already, "transformers has spread its experts over ranks already"),
    (hooked_experts, "has replaced the forward of this one MixtralExperts"),
    (hooked_block, "has replaced the forward of this one MixtralSparseMoeBlock"),
    (seven, r"num_experts \(7\) must be divisible by the size of the expert group \(2\)"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_layer_that_does_not_fit_is_named_and_no_layer_is_changed(
    change: Callable[[Any], None], message: str
) -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        model = build("mixtral", dtype=torch.float32)
        change(model)
        kinds, state = [type(m) for m in model.modules()], dict(model.named_parameters())
        with pytest.raises(ValueError, match=message):
            apply_to_transformers(model, group)
        assert [type(m) for m in model.modules()] == kinds
        assert all(p is state[n] for n, p in model.named_parameters())

    run_in_threads(rank_main, world_size=2)


def apply_after_fsdp() -> None:
    model = build("mixtral")
    for layer in model.model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match="its parameters are sharded already"):
        apply_to_transformers(model, dist.group.WORLD)


def test_what_fsdp_has_sharded_before_is_refused() -> None:
    run_distributed(apply_after_fsdp, world_size=2)


def test_a_second_application_is_refused() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        model = apply_to_transformers(build("mixtral"), group)
        with pytest.raises(ValueError, match="must be spread over ranks once"):
            apply_to_transformers(model, group)

    run_in_threads(rank_main, world_size=2)


def test_a_model_that_one_rank_refuses_is_spread_on_none() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        model = build("mixtral")
        if group.rank() == 1:
            apply_to_transformers(model)
        kinds = [type(m) for m in model.modules()]
        expected = ValueError if group.rank() == 1 else PeerError
        with pytest.raises(expected, match="must be spread over ranks once"):
            apply_to_transformers(model, group)
        assert [type(m) for m in model.modules()] == kinds

    run_in_threads(rank_main, world_size=2)


def test_other_experts_on_one_rank_are_an_error_on_all() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        model = build("mixtral", intermediate_size=24 + 8 * group.rank())
        with pytest.raises(ValueError, match="must equal those of rank"):
            apply_to_transformers(model, group)

    run_in_threads(rank_main, world_size=2)


def test_tokens_of_another_dtype_on_one_rank_are_an_error_on_all() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        experts = apply_to_transformers(build("mixtral"), group).model.layers[0].mlp.experts
        dtype = torch.int64 if group.rank() else torch.float64
        index = torch.zeros(3, CHOICES, dtype=torch.int64)
        experts(torch.ones(3, 16, dtype=dtype), index, torch.ones(3, CHOICES))

    with pytest.raises(RankError):
        run_in_threads(rank_main, world_size=2, timeout=20)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3", "lfm2_moe"])  # is tied
def test_what_is_saved_is_what_from_pretrained_loads(name: str, tmp_path: Path) -> None:
    names = expert_names(name)

    def rank_main(group: dist.ProcessGroup) -> None:
        model = apply_to_transformers(build(name), group)
        others = {n: t for n, t in model.state_dict().items() if not is_of_experts(n)}
        save_experts(model, tmp_path, others=others, names=names, group=group)
        if group.rank() == 0:
            model.config.save_pretrained(tmp_path)

    run_in_threads(rank_main, world_size=2)
    kind = getattr(transformers, f"{MODELS[name][0]}ForCausalLM")
    loaded = kind.from_pretrained(tmp_path, dtype=torch.float64)
    wanted = build(name).state_dict()
    found = loaded.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("name", MODELS)
def test_names_are_those_that_save_pretrained_writes(name: str, tmp_path: Path) -> None:
    model, names = build(name), expert_names(name)
    model.save_pretrained(tmp_path)
    written = {key for file in tmp_path.glob("*.safetensors") for key in load_file(file)}
    state = model.state_dict()
    # What is tied is written once.
    assert to_hf(state, names).keys() - {"lm_head.weight"} == written - {"lm_head.weight"}
    assert all(names.module_key(names.file_key(key)) == key for key in state)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "granitemoe"])
def test_what_save_pretrained_wrote_is_loaded_by_each_rank(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)

    def rank_main(group: dist.ProcessGroup) -> None:
        model = apply_to_transformers(build(name), group)
        wanted = {n: p.detach().clone() for n, p in model.named_parameters() if is_of_experts(n)}
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        load_experts(model, tmp_path, names=expert_names(name), group=group)
        assert all(torch.equal(model.get_parameter(n), wanted[n]) for n in wanted)

    run_in_threads(rank_main, world_size=2)
