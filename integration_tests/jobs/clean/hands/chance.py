"""Programs whose way depends on their data or on chance: rollouts, exits, sampling, dropout."""

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from integration_tests.jobs.clean.job import Hand

hand = Hand("branches and chance")


class Policy(nn.Module):
    def __init__(self, vocab=11, width=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.cell = nn.GRUCell(width, width)
        self.logits = nn.Linear(width, vocab)

    def step(self, token, state):
        state = self.cell(self.embed(token), state)
        return self.logits(state), state

    def forward(self, tokens):
        state = tokens.new_zeros(len(tokens), 8, dtype=torch.float)
        out = []
        for t in tokens.unbind(1):
            logits, state = self.step(t, state)
            out.append(logits)
        return torch.stack(out, 1)


def rollout(policy, prompts, seeds, length=6, top_p=1.0):
    """Sample with a generator for each prompt."""
    gens = [torch.Generator().manual_seed(int(s)) for s in seeds]
    tokens = prompts
    with torch.no_grad():
        for _ in range(length):
            probs = policy(tokens)[:, -1].double().softmax(-1)
            if top_p < 1:
                order = probs.argsort(-1, descending=True)
                ranked = probs.gather(-1, order)
                kept = ranked.cumsum(-1) - ranked < top_p
                probs = torch.zeros_like(probs).scatter(-1, order, ranked * kept)
            u = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in gens])
            cdf = probs.cumsum(-1) / probs.sum(-1, keepdim=True)
            nxt = (cdf < u[:, None]).sum(-1).clamp(max=probs.shape[-1] - 1)
            tokens = torch.cat([tokens, nxt[:, None]], 1)
    return tokens


def reduce(net, world):
    if world.size > 1:
        for p in net.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= world.size


@hand(("stale", "input", ""), ("gradient:logits.weight",), forms=("1.0", "0.7"))
def rolled_out(world):
    """Answers are sampled from the model itself, top-p or not, then learned from."""
    torch.manual_seed(0)
    net = Policy()
    opt = torch.optim.Adam(net.parameters(), lr=2e-2)
    for it in range(3):
        ids = torch.arange(8)[world.rank :: world.size]
        seeds = ids * 100 + it + (7 if world.bug == "stale" and it == 1 else 0)
        seqs = rollout(net, (ids % 11)[:, None], seeds, top_p=float(world.form))
        reward = (seqs[:, 1:] % 2 == 0).float().mean(1)
        logp = -F.cross_entropy(
            net(seqs[:, :-1]).transpose(1, 2), seqs[:, 1:], reduction="none"
        ).sum(1)
        (-(logp * (reward - 0.5)).mean()).backward()
        reduce(net, world)
        opt.step()
        opt.zero_grad()


@hand(("forward:logits",), ("rate",))
def until_done(world):
    """A rank stops when all of its samples have: ranks make other numbers of calls."""
    torch.manual_seed(1)
    net = Policy()
    opt = torch.optim.SGD(net.parameters(), lr=0.3)
    for it in range(2):
        ids = torch.arange(6)[world.rank :: world.size] + it
        seqs = rollout(net, (ids % 11)[:, None], ids, length=5)
        alive = (seqs != 3).long().cumprod(1)
        longest = int(alive.sum(1).max().clamp(max=5))
        logits = net(seqs[:, :longest] if world.size > 1 else seqs[:, :-1])
        target = seqs[:, 1 : 1 + logits.shape[1]]
        keep = alive[:, : logits.shape[1]] * (alive[:, 1 : 1 + logits.shape[1]] >= 0)
        loss = F.cross_entropy(logits.transpose(1, 2), target, reduction="none")
        ((loss * keep).sum() / 20 * world.size).backward()
        reduce(net, world)
        opt.step()
        opt.zero_grad()


class Exits(nn.Module):
    """Leaves when it is sure, sample by sample."""

    def __init__(self, depth=4):
        super().__init__()
        self.inp = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(depth))

    def forward(self, x, bar=0.45):
        h = self.inp(x)
        out = x.new_zeros(len(x), 3)
        alive = torch.arange(len(x))
        for block, head in zip(self.blocks, self.heads):
            h = h + block(h).tanh()
            y = head(h)
            last = block is self.blocks[-1]
            done = torch.ones(len(h), dtype=torch.bool) if last else y.softmax(-1).amax(-1) > bar
            out = out.index_put((alive[done],), y[done])
            h, alive = h[~done], alive[~done]
            if not len(alive):
                break
        return out


@hand(("bar", "forward|loss|gradient", ""), ("weight:inp.weight",))
def early_exit(world):
    """Samples leave at another depth each; modules are called with fewer and fewer of them."""
    torch.manual_seed(2)
    net = Exits()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(1)
    for _ in range(3):
        x, y = torch.randn(12, 5, generator=g), torch.randint(3, (12,), generator=g)
        x, y = x[world.rank :: world.size], y[world.rank :: world.size]
        F.cross_entropy(net(x, 0.9 if world.bug == "bar" and world.rank else 0.45), y).backward()
        reduce(net, world)
        opt.step()
        opt.zero_grad()


class Depths(nn.Module):
    """Only the tokens that a router likes go through a block."""

    def __init__(self, capacity):
        super().__init__()
        self.embed, self.router = nn.Embedding(11, 8), nn.Linear(8, 1)
        self.block, self.out, self.capacity = nn.Linear(8, 8), nn.Linear(8, 11), capacity

    def forward(self, tokens):
        h = self.embed(tokens)
        w = self.router(h)[..., 0]
        top = w.topk(self.capacity, dim=1).indices.sort(1).values
        chosen = h.gather(1, top[..., None].expand(-1, -1, 8))
        made = self.block(chosen).relu() * w.gather(1, top)[..., None].sigmoid()
        h = h.scatter_add(1, top[..., None].expand(-1, -1, 8), made)
        return self.out(h)


@hand(("capacity", "forward", ""), ("gradient:router.weight",), forms=("3", "5"))
def mixture_of_depths(world):
    """A block is given some tokens of each sample."""
    torch.manual_seed(3)
    net = Depths(int(world.form) - (world.bug == "capacity" and world.rank))
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(2)
    for _ in range(3):
        t = torch.randint(11, (8, 8), generator=g)[world.rank :: world.size]
        F.cross_entropy(net(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten()).backward()
        reduce(net, world)
        opt.step()
        opt.zero_grad()


class Routed(nn.Module):
    """Top-k experts in a loop; an expert is given whatever rows come."""

    def __init__(self, k=2, experts=4):
        super().__init__()
        self.embed, self.gate = nn.Embedding(11, 8), nn.Linear(8, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12), nn.SiLU(), nn.Linear(12, 8)) for _ in range(experts)
        )
        self.out, self.k = nn.Linear(8, 11), k

    def forward(self, tokens):
        h = self.embed(tokens)
        x = h.flatten(0, 1)
        p, idx = self.gate(x).softmax(-1).topk(self.k, -1)
        p = p / p.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            row, slot = (idx == e).nonzero(as_tuple=True)
            if len(row):
                y = y.index_add(0, row, expert(x[row]) * p[row, slot, None])
        return self.out(h + y.view_as(h))


@hand(("dropped", "forward|gradient|loss", ""), ("gradient:gate.weight",), forms=("3", "2"))
def experts(world):
    """A mixture of experts in a Python loop."""
    torch.manual_seed(4)
    net = Routed(int(world.form))
    opt = torch.optim.SGD(net.parameters(), lr=0.2)
    g = torch.Generator().manual_seed(3)
    for _ in range(3):
        t = torch.randint(11, (8, 6), generator=g)[world.rank :: world.size]
        loss = F.cross_entropy(net(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten())
        loss.backward()
        if world.bug == "dropped" and world.rank:
            net.experts[1][0].weight.grad = None
        reduce(net, world)
        opt.step()
        opt.zero_grad()


@hand(("start:a.weight",), ("unsummed", "gradient|weight", "", ""), forms=("same", "per-rank"))
def dropped_out(world):
    """Dropout, with one seed for all ranks or one for each."""
    torch.manual_seed(5)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.drop, self.b = nn.Linear(5, 16), nn.Dropout(0.3), nn.Linear(16, 1)

        def forward(self, x):
            return self.b(self.drop(self.a(x).relu()))

    net = Net()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(4)
    torch.manual_seed(50 + (world.rank if world.form == "per-rank" else 0))
    for _ in range(3):
        x = torch.randn(8, 5, generator=g)[world.rank :: world.size]
        net(x).square().mean().backward()
        if world.bug != "unsummed":
            reduce(net, world)
        opt.step()
        opt.zero_grad()


@hand(("dice", "forward|loss", ""), ("gradient:layers.0.weight",))
def stochastic_depth(world):
    """Layers are left out by chance, for all ranks alike by a generator of Python's."""
    torch.manual_seed(6)

    class Net(nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
            self.dice = random.Random(seed)

        def forward(self, x):
            for i, layer in enumerate(self.layers):
                if i == 0 or self.dice.random() < 0.7:
                    x = x + layer(x).relu()
            return x

    net = Net(3 + (world.rank if world.bug == "dice" else 0))
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    g = torch.Generator().manual_seed(5)
    for _ in range(4):
        x = torch.randn(8, 6, generator=g)[world.rank :: world.size]
        net(x).square().mean().backward()
        reduce(net, world)
        opt.step()
        opt.zero_grad()


@hand(("forward:tail",), ("gradient:tail.weight",))
def augmented(world):
    """Samples are augmented by chance of their own number, before the model sees them."""
    torch.manual_seed(7)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.tail = nn.Conv2d(1, 4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.tail(self.stem(x).relu().mean((2, 3)))

    net = Net()
    opt = torch.optim.SGD(net.parameters(), lr=0.2)
    g = torch.Generator().manual_seed(6)
    for it in range(3):
        x, y = torch.randn(8, 1, 8, 8, generator=g), torch.randint(3, (8,), generator=g)
        mine = range(world.rank, 8, world.size)

        def aug(i):
            own = torch.Generator().manual_seed(it * 8 + i)
            z = x[i].flip(-1) if torch.rand((), generator=own) < 0.5 else x[i]
            return z + 0.1 * torch.randn(z.shape, generator=own)

        batch = torch.stack([aug(i) for i in mine])
        F.cross_entropy(net(batch), y[list(mine)]).backward()
        reduce(net, world)
        opt.step()
        opt.zero_grad()


@hand(("temperature", "forward|loss|backward", ""), ("weight:enc.weight",))
def gumbel(world):
    """Gumbel noise that comes with the sample, straight through."""
    torch.manual_seed(8)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc, self.code = nn.Linear(5, 4), nn.Linear(4, 5, bias=False)

        def forward(self, x, noise, tau):
            soft = ((self.enc(x) + noise) / tau).softmax(-1)
            hard = F.one_hot(soft.argmax(-1), 4) - soft.detach() + soft
            return self.code(hard)

    net = Net()
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(7)
    for _ in range(3):
        x = torch.randn(8, 5, generator=g)
        noise = -(-torch.rand(8, 4, generator=g).log()).log()
        sl = slice(world.rank, None, world.size)
        y = net(x[sl], noise[sl], 0.5 if world.bug == "temperature" and world.rank else 1.0)
        F.mse_loss(y, x[sl]).backward()
        reduce(net, world)
        opt.step()
        opt.zero_grad()


@hand(("rate",), ("gradient:body.weight",))
def skip_bad_batches(world):
    """A batch whose loss is too large is left out, by all ranks together."""
    torch.manual_seed(9)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 1)

        def forward(self, x):
            return self.body(x)

    net = Net()
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    g = torch.Generator().manual_seed(8)
    for it in range(5):
        x = torch.randn(8, 4, generator=g)[world.rank :: world.size] * (20 if it == 1 else 1)
        loss = net(x).square().mean()
        seen = loss.detach().clone()
        if world.size > 1:
            dist.all_reduce(seen)
            seen /= world.size
        if seen > 30:
            continue
        loss.backward()
        reduce(net, world)
        opt.step()
        opt.zero_grad()


@hand(("gradient:q.weight",), ("forward:q",))
def curriculum(world):
    """Hard samples join when the loss is low enough; until then they are weighted with zero."""
    torch.manual_seed(10)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.p, self.q = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.q(self.p(x).tanh())

    net = Net()
    opt = torch.optim.Adam(net.parameters(), lr=5e-2)
    g = torch.Generator().manual_seed(9)
    level = 1.0
    for _ in range(4):
        x = torch.randn(16, 4, generator=g)
        easy = x.norm(dim=1) < 1.2 + level
        sl = slice(world.rank, None, world.size)
        x, easy = x[sl], easy[sl]
        each = F.cross_entropy(net(x), (x[:, 0] > 0).long(), reduction="none")
        total = torch.stack([(each * easy).sum().detach(), easy.sum()])
        if world.size > 1:
            dist.all_reduce(total)
        ((each * easy).sum() / total[1] * world.size).backward()
        level += float(total[0] / total[1] < 0.6)
        reduce(net, world)
        opt.step()
        opt.zero_grad()
