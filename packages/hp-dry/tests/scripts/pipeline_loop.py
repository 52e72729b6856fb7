"""A plain loop over torch.distributed.pipelining: nothing here knows of hp-*.

torchrun --nproc-per-node 4 pipeline_loop.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

MICROBATCHES, ROWS, DIM, CLASSES = 8, 4, 64, 10


def main() -> None:
    """Train."""
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    last = rank == size - 1
    layers = [nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, CLASSES if last else DIM)]
    module = nn.Sequential(*layers).to(device)
    stage = PipelineStage(module, rank, size, device)
    schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, foreach=True)
    for step in range(2):
        if rank == 0:
            schedule.step(torch.randn(MICROBATCHES * ROWS, DIM, device=device))
        elif last:
            target = torch.randint(0, CLASSES, (MICROBATCHES * ROWS,), device=device)
            losses: list[torch.Tensor] = []
            schedule.step(target=target, losses=losses)
            print(f"step {step} loss {torch.stack(losses).mean().item():.3f}")  # noqa: T201
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
