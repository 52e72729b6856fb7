"""Tensors of files that are not of a model, compared with the model's own in their place.

Old files have buffers that models compute by themselves today: masks, positions, frequencies. Some
files have weights of parts that transformers does not have, such as modules that predict further
tokens: those are not trained, and a warning says so.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from hp_base.errors import ConfigError
from hp_checkpoint.safetensors import FileTensor
from hp_trainer.config import ModelConfig
from hp_transformers.families.copies import FREQUENCIES, require_frequencies, whole
from hp_transformers.stages.model import CausalModel, on_meta

_MASK = re.compile(r"(^|\.)attention\.bias$")
_MASKED = re.compile(r"(^|\.)attention\.masked_bias$")
_HIDES = -1e4  # bound of the values that are added to scores to hide a position


def require_alike(
    config: ModelConfig, made: CausalModel, beside: Mapping[str, tuple[str, FileTensor]]
) -> list[str]:
    """Refuse tensors of files that are neither of a model nor equal to its own in their place.

    Args:
        config: Model configuration with the folder.
        made: Model of the folder, on the meta device.
        beside: Name in files and tensor, by the name that the tensor would have in the model.

    Returns:
        Names of weights of parts that transformers does not have.

    Raises:
        hp_base.errors.ConfigError: About the first tensor to refuse.
    """
    if not beside:
        return []
    buffers = dict(on_meta(config, torch.float32, buffers=True).named_buffers())
    frequencies = [tensor for name, tensor in buffers.items() if name.endswith("inv_freq")]
    left_out = []
    for target, (source, file) in beside.items():
        if target.endswith(FREQUENCIES):
            require_frequencies(source, file, frequencies)
        elif target in buffers or _MASK.search(target) or _MASKED.search(target):
            _require_buffer(source, file, buffers.get(target), made)
        elif any(re.search(p, target) for p in made._keys_to_ignore_on_load_unexpected or ()):  # noqa: SLF001
            left_out.append(source)
        else:
            raise ConfigError(
                f"files of {type(made).__name__} must not have {source}, which is no tensor of "
                "the model"
            )
    return left_out


def _require_buffer(
    name: str, file: FileTensor, expected: Tensor | None, made: CausalModel
) -> None:
    values = whole(file).double()
    if expected is not None:
        is_alike = torch.equal(values, expected.to(values.dtype).view_as(expected))
    elif _MASK.search(name):
        is_alike = values.ndim == 4 and torch.equal(values, torch.ones_like(values).tril())
    else:
        is_alike = bool((values <= _HIDES).all())
    if not is_alike:
        raise ConfigError(
            f"tensor {name} must be what {type(made).__name__} makes by itself, and is not: take "
            "it out of the files to train with that"
        )
