"""How linear layers of models of transformers are shared by tensor-parallel ranks."""

from typing import Any

import pytest
import torch
from torch import nn

from hp_base.errors import ConfigError
from hp_transformers.stages.tensor_parallel import styles_of

transformers: Any = pytest.importorskip("transformers", reason="of `nox -s transformers`")
pytestmark = pytest.mark.filterwarnings("default")  # of transformers


def styles(name: str, *, ranks: int = 2, **fields: Any) -> dict[str, str]:
    """Styles in the first layer of a tiny model, by path in it."""
    from integration_tests.models.architectures.tiny import Tiny  # noqa: PLC0415 - needs transformers

    config = Tiny(name).config
    for key, value in fields.items():
        setattr(config, key, value)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    found = styles_of(model, layers, ranks)
    return {path[2:]: style for path, style in found.items() if path.startswith("0.")}


def test_attention_and_feed_forward_of_a_plan_exchange_once() -> None:
    found = styles("llama")

    assert found == {
        "self_attn.q_proj": "columns",
        "self_attn.k_proj": "columns",
        "self_attn.v_proj": "columns",
        "self_attn.o_proj": "rows",
        "mlp.gate_proj": "columns",
        "mlp.up_proj": "columns",
        "mlp.down_proj": "rows",
    }


def test_norms_of_heads_sum_their_gradients() -> None:
    assert styles("qwen3")["self_attn.q_norm"] == "summed"


def test_heads_that_ranks_cannot_share_are_gathered() -> None:
    found = styles("llama", num_key_value_heads=1)

    assert {found[f"self_attn.{name}_proj"] for name in "qkvo"} == {"gathered"}
    assert found["mlp.down_proj"] == "rows"


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("apertus", "mlp.up_proj"),  # its activation has parameters
        ("gemma3n_text", "mlp.gate_proj"),  # its activation looks at all features
        ("gpt_oss", "self_attn.q_proj"),  # its sinks are of heads
        ("gpt2", "attn.c_attn"),  # it has no plan, and another class of linear layers
    ],
)
def test_what_a_plan_does_not_tell_is_gathered(name: str, path: str) -> None:
    assert styles(name)[path] == "gathered"


def test_a_layer_whose_weight_is_read_from_outside_stays_whole() -> None:
    found = styles("falcon_mamba")

    assert "mixer.dt_proj" not in found
    assert found["mixer.in_proj"] == "gathered"


def test_a_model_without_anything_to_be_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match="no linear layer that so many ranks can share"):
        styles("gpt2", ranks=7)
