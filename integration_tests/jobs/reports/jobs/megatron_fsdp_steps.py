"""Megatron-FSDP, version 1, with torch's AdamW: Megatron-LM #5974."""

import os

import torch
import torch.distributed as dist
from megatron_fsdp_on_cpu import pretend
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

pretend()

from megatron_fsdp import fully_shard

DIM, SAMPLES, STEPS = 16, 8, 3


class Block(nn.Sequential):
    """A unit that is gathered at once."""


def make_state(optimizer) -> None:
    """Make an optimizer's state before its first step, by a step that changes nothing.

    Megatron-FSDP makes one for the sake of checkpoints.
    """
    for group in optimizer.param_groups:
        rate, group["lr"] = group["lr"], 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        group["lr"] = rate
    for state in optimizer.state.values():
        state["step"].zero_()
    optimizer.zero_grad()


def main() -> None:
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)
    if ranks > 1:
        model, optimizer = fully_shard(
            model,
            optimizer,
            device_mesh=init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("fsdp", "tp")),
            dp_shard_dim="fsdp",
            tp_dim="tp",
            fsdp_unit_modules=[Block],
            device=torch.device("cpu"),
            calculate_per_token_loss=True,  # gradients are sums over ranks
        )
    else:
        make_state(optimizer)
    data = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        x, y = torch.randn(2, SAMPLES, DIM, generator=data)
        (nn.functional.mse_loss(model(x[rank::ranks]), y[rank::ranks]) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
