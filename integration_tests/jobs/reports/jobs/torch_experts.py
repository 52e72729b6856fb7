"""Experts of one's own on torch's all-to-all, beside FSDP2: torch #160285."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

WORDS, DIM, EXPERTS, SAMPLES, LENGTH, STEPS = 32, 16, 4, 8, 8, 3


class Experts(nn.Module):
    """Experts of a rank, to which each rank sends its tokens."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, DIM, DIM) / DIM**0.5)
        self.group = None

    def forward(self, x, chosen):
        order = chosen.argsort(stable=True)
        given, x = chosen.bincount(minlength=EXPERTS), x[order]
        if self.group is None:
            outs = self.products(x, given.tolist())
        else:
            counts = all_to_all_single(given, None, None, self.group).view(
                dist.get_world_size(), -1
            )
            sent = given.view(len(counts), -1).sum(1).tolist()
            got = counts.sum(1).tolist()
            x = all_to_all_single_autograd(x, got, sent, self.group)
            expert = (
                torch.arange(counts.shape[1])
                .repeat(len(counts))
                .repeat_interleave(counts.flatten())
            )
            places = expert.argsort(stable=True)
            outs = self.products(x[places], counts.sum(0).tolist())
            outs = all_to_all_single_autograd(outs[places.argsort()], sent, got, self.group)
        return outs[order.argsort()]

    def products(self, x, counts):
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return torch.cat(
            [rows @ expert for rows, expert in zip(x.split(counts), weight, strict=True)]
        )


class Model(nn.Module):
    """Words, one layer of experts, and logits."""

    def __init__(self):
        super().__init__()
        self.words, self.router = nn.Embedding(WORDS, DIM), nn.Linear(DIM, EXPERTS)
        self.experts, self.out = Experts(), nn.Linear(DIM, WORDS)

    def forward(self, words):
        x = self.words(words)
        share, chosen = self.router(x).softmax(-1).max(-1)
        outs = self.experts(x.flatten(0, 1), chosen.flatten())
        return self.out(x + share[..., None] * outs.view_as(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--divided", action="store_true", help="experts' gradients by the ranks")
    args = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    model = Model()
    if ranks > 1:
        mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("fsdp", "ep"))
        experts = model.experts
        experts.group = mesh["ep"].get_group()
        experts.weight = nn.Parameter(distribute_tensor(experts.weight, mesh["ep"], [Shard(0)]))
        fully_shard(experts, mesh=mesh["fsdp"])
        if args.divided:
            experts.set_gradient_divide_factor(ranks)
        fully_shard(model, mesh=mesh["fsdp", "ep"]._flatten("dp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)
    data = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        words = torch.randint(WORDS, (SAMPLES, LENGTH), generator=data)[rank::ranks]
        nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
