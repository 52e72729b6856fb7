"""FSDP1's HYBRID_SHARD on a mesh whose sharded axis has one rank: torch #154888, verl #7493."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

DIM, SAMPLES, STEPS = 16, 8, 3


def main() -> None:
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 1))
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("replicate", "shard"))
        model = FullyShardedDataParallel(
            model,
            device_mesh=mesh,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)
    data = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        x, y = torch.randn(2, SAMPLES, DIM, generator=data)
        x, y = x[rank::ranks], y[rank::ranks, :1]
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
