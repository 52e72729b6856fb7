"""Initial weights that depend on the seed and on each parameter's global name alone.

Experts draw by their own global index, so the same expert starts the same wherever it lives.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hp_train.config import ModelConfig
from hp_train.parameters import Parameter
from hp_train.randomness import generator

# Matrices that write into the residual stream start smaller (Radford et al., 2019), so that its
# variance does not grow with depth.
_RESIDUAL_OUTPUTS = (".wo.weight", ".w2", ".w2.weight")


@torch.no_grad()
def initialize_parameters(
    parameters: Iterable[Parameter], config: ModelConfig, *, seed: int
) -> None:
    """Fill the local part of every parameter in place.

    Numbers are drawn in fp32 on the CPU, one matrix at a time, and the part that is here is then
    cast and copied, so that dtype, device and layout do not change them.

    Args:
        parameters: Under their global names.
        config: The whole model.
        seed: The run's seed.
    """
    for parameter in parameters:
        name, local, span = parameter.name, parameter.local, parameter.span
        if parameter.kind != "matrix":
            local.fill_(1.0 if parameter.kind == "norm" else 0.0)
            continue
        std = config.init_std
        if name.endswith(_RESIDUAL_OUTPUTS):
            std /= math.sqrt(2 * config.num_layers)
        if parameter.experts is None:
            local.copy_(_draw(parameter.shape, span, std, seed, name))
        for row, expert in enumerate(parameter.experts or ()):
            local[row].copy_(_draw(parameter.shape[1:], span[1:], std, seed, name, expert))


def _draw(
    shape: Sequence[int], span: Sequence[tuple[int, int]], std: float, seed: int, *name: str | int
) -> Tensor:
    values = torch.empty(shape, dtype=torch.float32)
    values.normal_(0.0, std, generator=generator(seed, "init", *name))
    return values[tuple(slice(start, stop) for start, stop in span)]
