"""Initial weights that depend on the seed and on each parameter's global name alone.

Experts draw by their own global index, so the same expert starts the same wherever it lives.
"""

import math

import torch
from torch import Tensor, nn

from hp_expert import GroupedExperts
from hp_train.config import ModelConfig
from hp_train.randomness import generator

# Matrices that write into the residual stream start smaller (Radford et al., 2019), so that its
# variance does not grow with depth.
_RESIDUAL_OUTPUTS = (".wo.weight", ".w2", ".w2.weight")

_ZEROS = (".bias", ".b1", ".b2", ".b3", ".sinks")


@torch.no_grad()
def initialize_parameters(module: nn.Module, config: ModelConfig, *, seed: int) -> None:
    """Fill every parameter and buffer of a stage in place.

    Numbers are drawn in fp32 on the CPU and then cast and copied, so that dtype and device do
    not change them either.

    Args:
        module: A stage whose parameters carry their global names.
        config: The whole model.
        seed: The run's seed.
    """
    experts = {n: m for n, m in module.named_modules() if isinstance(m, GroupedExperts)}
    for name, parameter in module.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
            continue
        if name.endswith(_ZEROS):
            parameter.zero_()
            continue
        std = config.init_std
        if name.endswith(_RESIDUAL_OUTPUTS):
            std /= math.sqrt(2 * config.num_layers)
        owner = experts.get(name.rpartition(".")[0])
        if owner is None:
            _fill(parameter, std, seed, name)
        else:
            for local in range(owner.num_local_experts):
                _fill(parameter[local], std, seed, name, owner.first_expert + local)
    for buffer in module.buffers():  # correction biases
        buffer.zero_()


def _fill(target: Tensor, std: float, seed: int, name: str, *index: int) -> None:
    values = torch.empty(target.shape, dtype=torch.float32)
    values.normal_(0.0, std, generator=generator(seed, "init", name, *index))
    target.copy_(values)
