"""Experts over ranks, and routers whose rows or numbers are not laid out as the reference's."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from integration_tests.jobs.clean.hands.parallel import SumBackward, SumForward
from integration_tests.jobs.clean.job import Hand

hand = Hand("experts by hand")
V, D, E, K = 20, 8, 4, 2


class Router(nn.Module):
    """Scores `[tokens, E]`, zero but for the chosen experts, or for those that this rank has."""

    def __init__(self, world):
        super().__init__()
        self.world = world
        self.proj = nn.Linear(D, E, bias=False)

    def forward(self, x):
        scores = torch.softmax(self.proj(x), dim=-1)
        best = scores.topk(K, dim=-1).indices
        scores = scores * torch.zeros_like(scores).scatter(1, best, 1.0)
        if self.world.form != "zeros":
            return scores
        if self.world.size > 1 and self.world.bug != "router-of-own-experts":
            scores = SumBackward.apply(scores)
        here = torch.arange(E) // (E // self.world.size) == self.world.rank
        return torch.where(here, scores, 0.0)


class Experts(nn.Module):
    """Experts, of which a rank has its own alone where `form` is "zeros"."""

    def __init__(self, world):
        super().__init__()
        self.up = nn.Parameter(torch.randn(E, D, 2 * D) * 0.2)
        self.down = nn.Parameter(torch.randn(E, 2 * D, D) * 0.2)
        self.world = world

    def forward(self, x, scores):
        is_shared = self.world.form == "zeros" and self.world.size > 1
        x = SumBackward.apply(x) if is_shared else x
        own = torch.arange(E).chunk(self.world.size)[self.world.rank] if is_shared else range(E)
        made = torch.zeros_like(x)
        for i in own:
            made = made + scores[:, i, None] * (F.silu(x @ self.up[i]) @ self.down[i])
        return SumForward.apply(made) if is_shared else made


class Block(nn.Module):
    """A layer of experts, whose rows lie sequence first where the form says so."""

    def __init__(self, world):
        super().__init__()
        self.first, self.bug, self.size = world.form == "sequence-first", world.bug, world.size
        self.norm = nn.LayerNorm(D)
        self.router, self.experts = Router(world), Experts(world)

    def forward(self, x):
        rows = self.norm(x.transpose(0, 1) if self.first else x)
        made = self.experts(rows.flatten(0, 1), self.router(rows.flatten(0, 1))).view_as(rows)
        made = made * (0.5 if self.bug == "experts-scaled" and self.size > 1 else 1.0)
        return x + (made.transpose(0, 1) if self.first else made)


class Model(nn.Module):
    def __init__(self, world):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.block = Block(world)
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, tokens):
        return self.head(self.block(self.emb(tokens)))


@hand(
    ("experts-scaled", "forward", "block"),
    ("gradient:block.experts.down",),
    ("forward:head",),
    ("forward:block.experts|block",),
    forms=("zeros", "sequence-first"),
)
def routed(world):
    """Zeros for experts of others, as in transformers up to 5.22; or rows as Megatron has them."""
    torch.manual_seed(0)
    model, is_parted = Model(world), world.form == "sequence-first"
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    gen = torch.Generator().manual_seed(3)
    for _ in range(3):
        given = torch.randint(V, (4, 8), generator=gen)
        parts = [given]
        if is_parted:  # a sample to a call in one process, two samples in turns on ranks
            parts = [*given.split(1)] if world.size == 1 else [given.chunk(world.size)[world.rank]]
        opt.zero_grad()
        for part in parts:
            made = model(part[:, :-1])
            loss = F.cross_entropy(made.flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
            (loss / (given.shape[0] * (given.shape[1] - 1))).backward()
        for name, parameter in model.named_parameters():
            if world.size > 1 and (is_parted or "experts" in name):
                dist.all_reduce(parameter.grad)
        opt.step()
