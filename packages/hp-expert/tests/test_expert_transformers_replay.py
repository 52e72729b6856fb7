"""Experts that were recorded elsewhere, taken by a transformers model with live gradients."""

import threading
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hp_expert import (
    GroupedExperts,
    MoE,
    TopKRouter,
    apply_to_transformers,
    record_routing,
    replay_routing,
    save_routing,
)
from hp_platform import PeerError
from hp_platform.testing import compare, run_in_threads

pytestmark = pytest.mark.usefixtures("one_thread")

transformers = pytest.importorskip("transformers")

EXPERTS, CHOICES, LAYERS = 8, 2, 2
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": CHOICES,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
ROUTED = {
    "n_routed_experts": EXPERTS,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 0,
    "n_group": 2,
    "topk_group": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": EXPERTS},
    "Qwen3Moe": {"num_experts": EXPERTS, "moe_intermediate_size": 12, "head_dim": 8},
    "GraniteMoe": {"num_local_experts": EXPERTS},
    "DeepseekV3": ROUTED
    | {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4}
    | {"qk_nope_head_dim": 4, "v_head_dim": 8},
    "Glm4Moe": ROUTED | {"head_dim": 8},
}


def build(kind: str = "Qwen3Moe", *, seed: int = 0) -> Any:
    config = getattr(transformers, f"{kind}Config")(**SIZES | MODELS[kind])
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(drawn / 4)
    return model.double().train()


def tokens(rank: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(3, 64, (2, 5 + rank), generator=generator)


def gradients(model: Any, ids: Tensor) -> dict[str, Tensor]:
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found | {"logits": out.logits.detach()}


def recorded(kind: str, ids: Tensor, *, seed: int) -> list[Tensor]:
    """Experts [B, S, K] of each layer, of a model with other weights."""
    model = apply_to_transformers(build(kind, seed=seed))
    with torch.no_grad(), record_routing(model) as record:
        model(ids)
    return record.experts(num_sequences=2)


@pytest.mark.parametrize("kind", MODELS)
def test_replaying_what_a_model_chooses_itself_changes_no_bit(kind: str) -> None:
    expected = gradients(apply_to_transformers(build(kind)), tokens())
    model = apply_to_transformers(build(kind))
    with replay_routing(model, recorded(kind, tokens(), seed=0)):
        actual = gradients(model, tokens())
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


class Chosen(nn.Module):
    """A router that gives given experts: what replay must be equal to."""

    def __init__(self, router: Any, experts: Tensor) -> None:
        super().__init__()
        self.weight, self.experts = router.weight, experts.flatten(0, 1)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden_states @ self.weight.T
        scores = logits.softmax(-1, dtype=torch.float32).gather(1, self.experts)
        return logits, scores / scores.sum(-1, keepdim=True), self.experts


def test_recorded_experts_are_taken_over_ranks_with_live_gradients_of_the_routers() -> None:
    """Against one process, unchanged but for routers that are told what to choose."""
    choices = [recorded("Mixtral", tokens(rank), seed=7) for rank in range(2)]

    def rank_main(group: dist.ProcessGroup) -> dict[str, Tensor]:
        model = apply_to_transformers(build("Mixtral"), group)
        with replay_routing(model, choices[group.rank()]), record_routing(model) as record:
            found = gradients(model, tokens(group.rank()))
        taken = record.experts(num_sequences=2)
        assert all(map(torch.equal, taken, choices[group.rank()]))
        return found

    results = run_in_threads(rank_main, world_size=2)
    expected: dict[str, Tensor] = {}
    actual = {f"logits{rank}": results[rank]["logits"] for rank in range(2)}
    oracle = build("Mixtral")
    routers = [layer.mlp.gate for layer in oracle.model.layers]
    for rank in range(2):
        for layer, router, experts in zip(oracle.model.layers, routers, choices[rank], strict=True):
            layer.mlp.gate = Chosen(router, experts)
        expected |= gradients(oracle, tokens(rank))
        expected[f"logits{rank}"] = expected.pop("logits")
    for name in expected.keys() - actual.keys():
        parts = [result[name] for result in results]
        is_stacked = name.endswith(("gate_up_proj", "down_proj"))
        actual[name] = torch.cat(parts) if is_stacked else parts[0] + parts[1]
    live = gradients(build("Mixtral"), tokens())["logits"]
    assert not torch.allclose(live, actual["logits0"])  # its own choice is another one
    comparison = compare(actual, expected, bound=1e-12)
    assert comparison.ok, str(comparison)


def test_recomputed_layers_take_the_replayed_experts_after_the_context_is_left() -> None:
    choices = recorded("Qwen3Moe", tokens(), seed=7)
    model, again = apply_to_transformers(build()), apply_to_transformers(build())
    with replay_routing(model, choices):
        expected = gradients(model, tokens())
    again.activation_checkpointing_enable(
        {"use_reentrant": False, "context_fn": partial(save_routing)}
    )
    with replay_routing(again, choices), record_routing(again) as record:
        loss = again(input_ids=tokens(), labels=tokens(), use_cache=False).loss
    loss.backward()
    assert [len(calls) for calls in record.calls.values()] == [1] * LAYERS
    assert all(torch.equal(p.grad, expected[n]) for n, p in again.named_parameters())


@pytest.mark.parametrize("keywords", [{"use_reentrant": False}, {"use_reentrant": True}])
def test_recomputation_that_would_choose_again_is_refused(keywords: dict[str, Any]) -> None:
    model = apply_to_transformers(build())
    model.activation_checkpointing_enable(keywords)
    choices = recorded("Qwen3Moe", tokens(), seed=7)
    with (
        pytest.raises(ValueError, match=r"must be hp_expert\.save_routing"),
        replay_routing(model, choices),
    ):
        pass
    model.eval()
    with torch.no_grad(), replay_routing(model, choices):
        model(tokens())


def test_threads_replay_each_their_own() -> None:
    model = apply_to_transformers(build().eval())
    choices = [recorded("Qwen3Moe", tokens(), seed=seed) for seed in (7, 8)]
    wait = threading.Barrier(2)

    def logits(experts: list[Tensor], found: list[Tensor]) -> None:
        with torch.no_grad(), replay_routing(model, experts):
            wait.wait()
            found.append(model(tokens()).logits)
            wait.wait()

    found: list[list[Tensor]] = [[], []]
    threads = [
        threading.Thread(target=logits, args=(c, f)) for c, f in zip(choices, found, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for experts, [actual] in zip(choices, found, strict=True):
        with torch.no_grad(), replay_routing(model, experts):
            assert torch.equal(actual, model(tokens()).logits)


def test_a_layer_that_is_not_named_chooses_itself() -> None:
    model = apply_to_transformers(build())
    own, other = (recorded("Qwen3Moe", tokens(), seed=seed) for seed in (0, 7))
    path = "model.layers.0.mlp.experts"
    with replay_routing(model, {path: own[0]}), record_routing(model) as record:
        model(tokens())
    assert all(map(torch.equal, record.experts(num_sequences=2), own))
    with (
        pytest.raises(ValueError, match=r"experts \(\['layers.0'\]\) must be of layers"),
        replay_routing(model, {"layers.0": other[0]}),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"len\(experts\) \(1\) must equal .* \(2\)"),
        replay_routing(model, other[:1]),
    ):
        pass
    with (
        pytest.raises(ValueError, match="apply_to_transformers returned"),
        replay_routing(build(), other),
    ):
        pass


def missing_token(experts: Tensor) -> Tensor:
    return experts[:, 1:]


def third_choice(experts: Tensor) -> Tensor:
    return torch.cat([experts, experts[..., :1]], dim=-1)


def no_such_expert(experts: Tensor) -> Tensor:
    return experts.where(experts != experts[0, 0, 0], EXPERTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (missing_token, r"experts to replay \(\(10, 2\)\) must be .* \(12, 2\)"),
        (third_choice, r"experts to replay \(\(12, 3\)\) must be .* \(12, 2\)"),
        (no_such_expert, r"must be in \[0, num_experts \(8\)\)|must be in \[-1, "),
    ],
)
def test_a_wrong_record_on_one_rank_is_an_error_on_all(change: Any, message: str) -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        model = apply_to_transformers(build(), group)
        choices = recorded("Qwen3Moe", tokens(group.rank()), seed=7)
        if group.rank() == 1:
            choices[1] = change(choices[1])
        kind = ValueError if group.rank() == 1 else PeerError
        with (
            pytest.raises(kind, match=message if group.rank() == 1 else "."),
            replay_routing(model, choices),
        ):
            model(tokens(group.rank()))

    run_in_threads(rank_main, world_size=2, timeout=20)


def test_no_expert_contributes_nothing() -> None:
    model = apply_to_transformers(build())
    choices = recorded("Qwen3Moe", tokens(), seed=0)
    choices[1][0, 0] = -1
    seen: list[Tensor] = []
    layer = model.model.layers[1]
    layer.mlp.register_forward_hook(lambda *hooked: seen.append(hooked[2].detach()))
    with replay_routing(model, choices):
        found = gradients(model, tokens())
    assert not seen[0][0, 0].any()
    assert seen[0][0, 1].any()
    assert all(tensor.isfinite().all() for tensor in found.values())


def test_a_router_that_chooses_in_another_way_is_refused() -> None:
    model = apply_to_transformers(build())
    choices = recorded("Qwen3Moe", tokens(), seed=7)

    def sorts(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden_states.reshape(-1, 16) @ model.model.layers[0].mlp.gate.weight.T
        values, experts = logits.sort(descending=True)
        return logits, values[:, :CHOICES].softmax(-1), experts[:, :CHOICES]

    model.model.layers[0].mlp.gate.forward = sorts
    with (
        pytest.raises(ValueError, match="this router chooses in another way"),
        replay_routing(model, choices),
    ):
        model(tokens())


def test_the_layer_of_this_package_takes_the_same_record() -> None:
    """A model of one's own is trained with what a transformers model recorded."""
    [choice, _] = recorded("Qwen3Moe", tokens(), seed=7)
    router = TopKRouter(16, EXPERTS, CHOICES, dtype=torch.float64)
    moe = MoE(router, GroupedExperts(EXPERTS, 16, 12, dtype=torch.float64))
    x = torch.randn(*choice.shape[:2], 16, dtype=torch.float64)
    y, routing = moe(x, replay=choice.flatten(0, 1))
    (y * x).sum().backward()
    assert torch.equal(routing.experts, choice.flatten(0, 1))
    assert router.weight.grad is not None
    assert router.weight.grad.any()
