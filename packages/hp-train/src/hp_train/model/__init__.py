"""The models: decoder-only transformers, and what models of one's own are made with."""

from hp_train.layout.parameter import ParameterSpec
from hp_train.model.ahead import Ahead, look_ahead
from hp_train.model.attention import attend
from hp_train.model.block import Microbatch, add_loss
from hp_train.model.declared import declare
from hp_train.model.layers import DropoutKey, Embedding, Lender, Linear, RMSNorm
from hp_train.model.loss import linear_cross_entropy
from hp_train.model.shapes import count_parameters, model_shapes
from hp_train.model.stage import Counted, Exchanges, Stage
from hp_train.model.transformer import TransformerStage

__all__ = [
    "Ahead",
    "Counted",
    "DropoutKey",
    "Embedding",
    "Exchanges",
    "Lender",
    "Linear",
    "Microbatch",
    "ParameterSpec",
    "RMSNorm",
    "Stage",
    "TransformerStage",
    "add_loss",
    "attend",
    "count_parameters",
    "declare",
    "linear_cross_entropy",
    "look_ahead",
    "model_shapes",
]
