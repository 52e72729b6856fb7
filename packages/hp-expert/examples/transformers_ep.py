"""A Mixtral or Qwen3-MoE of Hugging Face's transformers with its experts on two ranks.

Compares logits and the gradients of all parameters with those of one process, in fp64.

    pip install hp-expert transformers
    torchrun --nproc-per-node 2 transformers_ep.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from hp_expert import apply_to_transformers

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "experts_implementation": "eager",  # of the one process: transformers' faster ones lack fp64
}
CONFIGS = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=8),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=8, moe_intermediate_size=12, head_dim=8),
}


def build(config: PreTrainedConfig) -> PreTrainedModel:
    """The same random model on every rank."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).double()


def tokens(rank: int) -> torch.Tensor:
    """Other tokens on every rank, and another number of them."""
    return torch.randint(64, (2, 6 + rank), generator=torch.Generator().manual_seed(rank))


def gradients(model: PreTrainedModel, rank: int) -> torch.Tensor:
    """Train on the tokens of a rank; return the logits."""
    out = model(input_ids=tokens(rank), labels=tokens(rank))
    out.loss.backward()
    return out.logits.detach()


def whole(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient over the tokens of all ranks.

    That of experts is: it has come to their rank from everywhere. Others are summed, as any
    data-parallel wrapper does.
    """
    if isinstance(gradient, DTensor):
        return gradient.full_tensor()
    dist.all_reduce(gradient)
    return gradient


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return max|a - b| / max|b|."""
    return float((actual - expected).abs().max() / expected.abs().max())


def compare(name: str) -> float:
    """Return the largest error of logits and gradients."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    model, alone = build(CONFIGS[name]), build(CONFIGS[name])
    apply_to_transformers(model, mesh)
    expected = [gradients(alone, r) for r in range(2)]
    errors = [error(gradients(model, rank), expected[rank])]
    for parameter, reference in zip(model.parameters(), alone.parameters(), strict=True):
        if parameter.grad is not None and reference.grad is not None:
            errors.append(error(whole(parameter.grad), reference.grad))
    return max(errors)


def main() -> dict[str, float]:
    """Compare both models."""
    torch.set_num_threads(1)
    found = {name: compare(name) for name in CONFIGS}
    if dist.get_rank() == 0:
        for name, worst in found.items():
            print(f"{name}: logits and gradients differ from one process by {worst:.1e}")
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
