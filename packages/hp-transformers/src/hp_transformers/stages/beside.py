"""Tensors of files that are none of a model, compared with what the model has in their place.

Files of some age have buffers that models make by themselves since: masks, positions, frequencies.
Some have weights of parts that transformers does not have, such as modules that predict further
tokens: those are not trained, and whoever trains is told.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hp_base.errors import ConfigError
from hp_checkpoint.safetensors import FileTensor
from hp_trainer.config import ModelConfig
from hp_transformers.families.copies import FREQUENCIES, require_frequencies, whole
from hp_transformers.stages.made import on_meta

_MASK = re.compile(r"(^|\.)attention\.bias$")
_MASKED = re.compile(r"(^|\.)attention\.masked_bias$")
_HIDES = -1e4  # what is added to hide a position is at most that


def require_alike(
    config: ModelConfig, made: Any, beside: Mapping[str, tuple[str, FileTensor]]
) -> list[str]:
    """Refuse tensors of files that are neither of a model nor what it has in their places.

    Args:
        config: Model configuration with the folder.
        made: Its model, on the meta device.
        beside: Names in files, and tensors, by the names that they would have in the model.

    Returns:
        Names of weights of parts that transformers does not have.

    Raises:
        hp_base.errors.ConfigError: About the first that is something else.
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


def _require_buffer(name: str, file: FileTensor, expected: Tensor | None, made: Any) -> None:
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
