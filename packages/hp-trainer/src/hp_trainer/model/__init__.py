"""The models: decoder-only transformers, and what models of one's own are made with."""

from hp_trainer.layout.parameter import ParameterSpec
from hp_trainer.model.attention import attend
from hp_trainer.model.block import Ahead, Microbatch, add_loss, look_ahead
from hp_trainer.model.capabilities import (
    Countable,
    Counted,
    CutByExchanges,
    DocumentTrial,
    Exchanges,
    Spreading,
)
from hp_trainer.model.layers import DropoutKey, Embedding, Lender, Linear, RMSNorm
from hp_trainer.model.loss import linear_cross_entropy
from hp_trainer.model.parameters import declare
from hp_trainer.model.stage import Stage
from hp_trainer.model.transformer import TransformerStage, count_parameters, model_shapes

__all__ = [
    "Ahead",
    "Countable",
    "Counted",
    "CutByExchanges",
    "DocumentTrial",
    "DropoutKey",
    "Embedding",
    "Exchanges",
    "Lender",
    "Linear",
    "Microbatch",
    "ParameterSpec",
    "RMSNorm",
    "Spreading",
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
