"""An architecture that transformers does not have: attention and feed-forward of one norm, side by
side, each scaled by a learned vector, and squared ReLU."""

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_tidal import TidalConfig


def rotate(x, cos, sin):
    """Turn pairs of channels by the angles of their positions."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class TidalAttention(nn.Module):
    """Attention with shared keys."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        width, kv_width = config.hidden_size, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x, angles, attention_mask=None, **kwargs):
        shape = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (
            part(x).view(shape).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, *angles), rotate(k, *angles)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        out, _ = attend(self, q, k, v, attention_mask, scaling=self.scaling, dropout=0.0, **kwargs)
        return self.o_proj(out.reshape(*x.shape[:2], -1))


class TidalLayer(nn.Module):
    """One block."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.mix = TidalAttention(config, layer_idx)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.ebb = nn.Parameter(torch.ones(config.hidden_size))
        self.flow = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, hidden_states, angles, **kwargs):
        x = self.norm(hidden_states)
        wide = torch.relu(self.up_proj(x)).square()
        return (
            hidden_states
            + self.ebb * self.mix(x, angles, **kwargs)
            + self.flow * self.down_proj(wide)
        )


class TidalPreTrainedModel(PreTrainedModel):
    """What all Tidal models have."""

    config_class = TidalConfig
    base_model_prefix = "model"
    _no_split_modules = ["TidalLayer"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True


class TidalModel(TidalPreTrainedModel):
    """Layers between an embedding and a norm."""

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(TidalLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs
    ):
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=position_ids,
        )
        width = self.config.hidden_size // self.config.num_attention_heads
        steps = torch.arange(0, width, 2, device=x.device, dtype=torch.float) / width
        turned = position_ids[:, None, :, None].float() * self.config.rope_theta**-steps
        angles = (turned.cos().to(x.dtype), turned.sin().to(x.dtype))
        kwargs.pop("use_cache", None)
        for layer in self.layers:
            x = layer(x, angles, attention_mask=mask, position_ids=position_ids, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))


class TidalForCausalLM(TidalPreTrainedModel, GenerationMixin):
    """The model with its output matrix."""

    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config):
        super().__init__(config)
        self.model = TidalModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs
    ):
        hidden = self.model(input_ids, attention_mask, position_ids, inputs_embeds, **kwargs)
        return CausalLMOutputWithPast(logits=self.lm_head(hidden.last_hidden_state))
