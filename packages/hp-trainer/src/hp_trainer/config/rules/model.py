"""Settings of the model that must fit each other."""

from collections.abc import Iterator

from hp_base.messages import shown
from hp_trainer.config import Config, ModelConfig
from hp_trainer.config.rules.hints import near_divisors, near_multiples

_GQA_ONLY = ("qk_norm", "attention_bias", "attention_sinks")


def model_rules(config: Config) -> Iterator[str]:
    """Yield which parts of a model do not fit each other, or the length of a sequence."""
    model = config.model
    if model.is_own:
        yield from _own(config)
    yield from part_rules(model)
    if 0 < model.max_positions < config.data.seq_len:
        yield (
            f"data.seq_len ({config.data.seq_len}) must be at most "
            f"model.max_positions ({model.max_positions})"
        )
    if model.num_mtp_modules >= config.data.seq_len:
        yield (
            f"model.num_mtp_modules ({model.num_mtp_modules}) must be less than "
            f"data.seq_len ({config.data.seq_len})"
        )


def part_rules(model: ModelConfig) -> Iterator[str]:
    """Yield which parts of a model do not fit each other, whatever it is trained on."""
    if not model.is_own:
        yield from _attention(model)
        yield from _rotary(model)
    yield from _experts(model)
    if model.num_dense_layers > model.num_layers:
        yield (
            f"model.num_dense_layers ({model.num_dense_layers}) must be at most "
            f"model.num_layers ({model.num_layers})"
        )


def _own(config: Config) -> Iterator[str]:
    """Yield what needs to know the inside of a model cannot be asked of one of the user's own."""
    name = config.model.origin
    if config.model.factory and config.model.transformers:
        yield f"model.transformers ({shown(config.model.transformers)}) must be empty with {name}"
    if config.model.num_mtp_modules:
        yield f"model.num_mtp_modules ({config.model.num_mtp_modules}) must be 0 with {name}"
    if config.model.tie_embeddings and config.model.factory:
        yield f"model.tie_embeddings (true) must be false with {name}"
    if config.train.optimizer == "muon":
        yield (
            f'train.optimizer ("muon") must be "adamw" with {name}: its matrices may be several '
            "in one"
        )
    if config.run.init_from:
        yield f"run.init_from ({shown(config.run.init_from)}) must be empty with {name}"


def _attention(model: ModelConfig) -> Iterator[str]:
    heads = f"model.num_heads ({model.num_heads})"
    if model.attention == "mla":
        for key in _GQA_ONLY:
            if getattr(model, key):
                yield f'model.{key} (true) must be false with model.attention ("mla")'
        if model.rope_head_dim % 2:
            yield f"model.rope_head_dim ({model.rope_head_dim}) must be even"
    else:
        if model.num_heads % model.num_kv_heads:
            yield (
                f"model.num_kv_heads ({model.num_kv_heads}) must divide {heads}"
                f"{near_divisors(model.num_kv_heads, model.num_heads)}"
            )
        if model.head_dim % 2:
            yield f"model.head_dim ({model.head_dim}) must be even"
        if model.head_dim == 0 and model.dim % (2 * model.num_heads):
            yield (
                f"model.dim ({model.dim}) must be a multiple of 2 x {heads} where model.head_dim "
                f"is 0{near_multiples(model.dim, 2 * model.num_heads)}"
            )
    if model.full_attention_every and not model.sliding_window:
        yield (
            f"model.full_attention_every ({model.full_attention_every}) must be 0 "
            f"with model.sliding_window (0)"
        )


def _rotary(model: ModelConfig) -> Iterator[str]:
    if model.rope_scaling == "llama3" and model.rope_low_factor >= model.rope_high_factor:
        yield (
            f"model.rope_low_factor ({model.rope_low_factor:g}) must be less than "
            f"model.rope_high_factor ({model.rope_high_factor:g})"
        )
    if model.rope_scaling == "yarn" and model.rope_beta_slow >= model.rope_beta_fast:
        yield (
            f"model.rope_beta_slow ({model.rope_beta_slow:g}) must be less than "
            f"model.rope_beta_fast ({model.rope_beta_fast:g})"
        )
    if model.rope_scaling == "none" and model.rope_factor != 1.0:
        yield (
            f'model.rope_factor ({model.rope_factor:g}) must be 1 with model.rope_scaling ("none")'
        )


def _experts(model: ModelConfig) -> Iterator[str]:
    experts, groups, limited = model.num_experts, model.num_expert_groups, model.num_limited_groups
    if experts == 0:
        return
    if model.top_k > experts:
        yield f"model.top_k ({model.top_k}) must be at most model.num_experts ({experts})"
    if experts % groups:
        yield (
            f"model.num_expert_groups ({groups}) must divide model.num_experts ({experts})"
            f"{near_divisors(groups, experts)}"
        )
        return
    if limited > groups:
        yield (
            f"model.num_limited_groups ({limited}) must be at most "
            f"model.num_expert_groups ({groups})"
        )
    elif limited * (experts // groups) < model.top_k:
        yield (
            f"model.top_k ({model.top_k}) must be at most model.num_limited_groups ({limited}) x "
            f"{experts // groups} experts of a group"
        )
    if limited < groups and experts // groups < 2:
        yield (
            f"model.num_expert_groups ({groups}) must be at most model.num_experts ({experts}) / 2"
        )
