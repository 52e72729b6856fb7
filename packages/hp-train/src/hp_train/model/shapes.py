"""Names and shapes of all tensors of a model, found without memory for any of them."""

import torch

from hp_train.config import ModelConfig
from hp_train.model.transformer import TransformerStage


def whole_model(model: ModelConfig) -> TransformerStage:
    """The whole model as one stage on the meta device."""
    layers = range(model.num_layers)
    with torch.device("meta"):
        return TransformerStage(model, model.vocab_size, layers=layers, first=True, last=True)


def model_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters and buffers, by global name."""
    stage = whole_model(model)
    named = [*stage.named_parameters(), *stage.named_buffers()]
    return {name: tuple(tensor.shape) for name, tensor in named}


def count_parameters(model: ModelConfig) -> int:
    """Number of parameters of the whole model, without correction biases."""
    return sum(parameter.numel() for parameter in whole_model(model).parameters())
