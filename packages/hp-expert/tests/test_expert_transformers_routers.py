"""Settings of known models choose and weigh as the routers of transformers do.

The test needs `transformers`, which no session installs by itself (`nox -s transformers`).
"""

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

from hp_expert import TopKRouter

transformers = pytest.importorskip("transformers")

DIM, EXPERTS, CHOICES = 32, 16, 3
# model, class of its router, its configuration, the same for us
MODELS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("mixtral", "MixtralTopKRouter", {"num_local_experts": EXPERTS}, {}),
    ("qwen3_moe", "Qwen3MoeTopKRouter", {"num_experts": EXPERTS, "norm_topk_prob": True}, {}),
    (
        "qwen2_moe",
        "Qwen2MoeTopKRouter",
        {"num_experts": EXPERTS, "norm_topk_prob": False},
        {"normalize": False},
    ),
    ("gpt_oss", "GptOssTopKRouter", {"num_local_experts": EXPERTS}, {"bias": True}),
    (
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        {
            "n_routed_experts": EXPERTS,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0,
            "n_group": 4,
            "topk_group": 2,
        },
        {
            "normalize": False,
            "scaling_factor": 16.0,
            "num_groups": 4,
            "num_limited_groups": 2,
            "group_score": "max",
        },
    ),
    (
        "deepseek_v3",
        "DeepseekV3TopkRouter",
        {
            "n_routed_experts": EXPERTS,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 4,
            "topk_group": 2,
        },
        {
            "score_function": "sigmoid",
            "correction_bias": True,
            "scaling_factor": 2.5,
            "num_groups": 4,
            "num_limited_groups": 2,
        },
    ),
]


def their_router(model: str, router: str, settings: dict[str, Any]) -> nn.Module:
    module = import_module(f"transformers.models.{model}.modeling_{model}")
    name = next(
        n
        for n in dir(module)
        if n.endswith("Config") and n.lower().startswith(model.replace("_", ""))
    )
    config = getattr(module, name)(hidden_size=DIM, num_experts_per_tok=CHOICES, **settings)
    made: nn.Module = getattr(module, router)(config)
    return made


@pytest.mark.parametrize(("model", "router", "theirs", "ours"), MODELS)
def test_a_known_model_is_routed_as_transformers_does(
    model: str, router: str, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    their = their_router(model, router, theirs)
    mine = TopKRouter(DIM, EXPERTS, CHOICES, **ours)
    with torch.no_grad():
        mine.weight.normal_()
        state: dict[str, torch.Tensor] = {"weight": mine.weight}
        if mine.bias is not None:
            state["bias"] = mine.bias.normal_()
        if mine.correction_bias is not None:
            state["e_score_correction_bias"] = mine.correction_bias.normal_(std=0.3)
        their.load_state_dict(state)
        x = torch.randn(200, DIM)
        _, weights, experts = their(x)
        routing = mine(x)
    expected = torch.zeros(200, EXPERTS).scatter_(1, experts, weights)
    actual = torch.zeros(200, EXPERTS).scatter_(1, routing.experts, routing.weights)
    assert torch.equal(actual != 0, expected != 0)
    assert torch.allclose(actual, expected, rtol=1e-5)
