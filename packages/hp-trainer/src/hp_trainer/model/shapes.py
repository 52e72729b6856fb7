"""All tensors of a model, found without memory for any of them."""

from hp_trainer.config import ModelConfig
from hp_trainer.model.declared import Declared, declared
from hp_trainer.model.stage import Stage
from hp_trainer.model.transformer import build_stage


def whole_model(model: ModelConfig) -> Stage:
    """The whole model as one stage on the meta device."""
    return build_stage(
        model, model.vocab_size, layers=range(model.num_layers), first=True, last=True
    )


def model_tensors(model: ModelConfig) -> dict[str, Declared]:
    """Return what all parameters and buffers are, by global name."""
    return declared(whole_model(model))


def model_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters and buffers, by global name."""
    return {name: tensor.shape for name, tensor in model_tensors(model).items()}


def count_parameters(model: ModelConfig) -> int:
    """Number of parameters of the whole model, without correction biases."""
    return sum(parameter.numel() for parameter in whole_model(model).parameters())
