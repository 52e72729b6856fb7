"""Experts of one's own beside Megatron-FSDP, version 2: Megatron-LM #5956."""

import os

import torch
import torch.distributed as dist
from megatron_fsdp_on_cpu import pretend
from torch.distributed.device_mesh import init_device_mesh
from torch_experts import LENGTH, SAMPLES, STEPS, WORDS, Model

pretend()

from megatron_fsdp.experimental import Flat, fully_shard, fully_shard_optimizer
from megatron_fsdp.experimental.placement import Placements


def main() -> None:
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    model = Model()
    if ranks > 1:
        mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("fsdp", "ep"))
        experts, flat = model.experts, [Flat()]
        experts.group = mesh["ep"].get_group()
        experts.weight = torch.nn.Parameter(experts.weight.data.chunk(ranks)[rank].clone())
        fully_shard(experts, mesh["fsdp"], Placements(["fsdp"], flat, flat, flat))
        fully_shard(model, mesh["fsdp", "ep"]._flatten("dp"), Placements(["dp"], flat, flat, flat))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)
    if ranks > 1:
        fully_shard_optimizer(optimizer)
    data = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        words = torch.randint(WORDS, (SAMPLES, LENGTH), generator=data)[rank::ranks]
        torch.nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
