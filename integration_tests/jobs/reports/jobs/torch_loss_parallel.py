"""A preference's loss of log-probabilities within torch's loss_parallel: torch #190746."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    loss_parallel,
    parallelize_module,
)

VOCABULARY, DIM, SAMPLES, STEPS = 32, 16, 8, 3


def main() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, VOCABULARY)
    )
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        plan = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model[3], mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)
    data = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (SAMPLES,), generator=data)
        weights = torch.rand(SAMPLES, VOCABULARY, generator=data)
        logits = model(tokens)
        if ranks > 1:
            weights = DTensor.from_local(
                weights.chunk(ranks, -1)[dist.get_rank()], mesh, [Shard(1)]
            )
            with loss_parallel():
                loss = -(torch.log_softmax(logits, -1) * weights).sum() / SAMPLES
                loss.full_tensor().backward()
        else:
            (-(torch.log_softmax(logits, -1) * weights).sum() / SAMPLES).backward()
        optimizer.step()
        optimizer.zero_grad()
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
