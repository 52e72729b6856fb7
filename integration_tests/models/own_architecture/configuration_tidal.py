"""Config of an architecture that transformers does not have."""

from transformers import PretrainedConfig


class TidalConfig(PretrainedConfig):
    """Sizes of a Tidal model."""

    model_type = "tidal"
    base_model_tp_plan = {
        "layers.*.mix.q_proj": "colwise",
        "layers.*.mix.k_proj": "colwise",
        "layers.*.mix.v_proj": "colwise",
        "layers.*.mix.o_proj": "rowwise",
        "layers.*.up_proj": "colwise",
        "layers.*.down_proj": "rowwise",
    }

    def __init__(
        self,
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        rope_theta=10000.0,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.max_position_embeddings = max_position_embeddings
        self.rope_theta = rope_theta
        super().__init__(**kwargs)
