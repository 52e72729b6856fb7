"""A layer of one's own on Megatron's sum over ranks, given a transposed tensor: #5338."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "libraries"))

import torch
import torch.distributed as dist
from megatron_on_cpu import pretend

pretend()

from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import nn

WORDS, DIM, HIDDEN, SAMPLES, LENGTH, STEPS = 32, 16, 32, 4, 8, 2


class Parted(nn.Module):
    """Two linear layers, of which a rank has a part of the hidden dim."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM, bias=False)
        parts = parallel_state.get_tensor_model_parallel_world_size()
        part = parallel_state.get_tensor_model_parallel_rank()
        self.up.weight = nn.Parameter(self.up.weight.data.chunk(parts)[part].clone())
        self.up.bias = nn.Parameter(self.up.bias.data.chunk(parts)[part].clone())
        self.down.weight = nn.Parameter(self.down.weight.data.chunk(parts, 1)[part].clone())

    def forward(self, x):
        hidden = torch.tanh(self.up(copy_to_tensor_model_parallel_region(x)))
        return reduce_from_tensor_model_parallel_region(self.down(hidden).mT).mT


def main() -> None:
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "0")
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, DIM), Parted(), nn.Linear(DIM, WORDS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)
    data = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        words = torch.randint(WORDS, (SAMPLES, LENGTH), generator=data)
        nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
