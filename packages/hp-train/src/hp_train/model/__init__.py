"""The models: decoder-only transformers, dense or with experts, built from one block."""

from hp_train.model.ahead import Ahead, look_ahead
from hp_train.model.block import Microbatch, add_loss
from hp_train.model.layers import DropoutKey
from hp_train.model.shapes import count_parameters, model_shapes
from hp_train.model.transformer import TransformerStage

__all__ = [
    "Ahead",
    "DropoutKey",
    "Microbatch",
    "TransformerStage",
    "add_loss",
    "count_parameters",
    "look_ahead",
    "model_shapes",
]
