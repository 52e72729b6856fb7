"""The reference model: a decoder-only mixture-of-experts transformer."""

from hp_train.model.initialization import initialize_parameters
from hp_train.model.layers import DropoutKey
from hp_train.model.transformer import Microbatch, TransformerStage, add_loss

__all__ = [
    "DropoutKey",
    "Microbatch",
    "TransformerStage",
    "add_loss",
    "initialize_parameters",
]
