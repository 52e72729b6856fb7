"""Samples in another order or grouping, and losses and gradients that cancel."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from integration_tests.jobs.clean.job import Hand

hand = Hand("order, sums that cancel")
STEPS = 3


def mlp(*sizes, act=nn.Tanh):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


def allreduce_(params, size, op="mean"):
    for p in params:
        if size > 1 and p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad.div_(size if op == "mean" else 1)


@hand(
    ("local-order", "loss|gradient", ""),
    ("forward:2",),
    forms=("interleaved", "reversed", "sorted", "blocks"),
)
def shuffled(world):
    """Which rank has which sample, and in which order, is nobody's business."""
    torch.manual_seed(0)
    net = mlp(5, 8, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    g = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x, y = torch.randn(12, 5, generator=g), torch.randint(3, (12,), generator=g)
        r, w = world.rank, world.size
        order = {
            "interleaved": torch.arange(12)[r::w],
            "reversed": torch.arange(12).flip(0)[r::w],
            "sorted": y.argsort(stable=True)[r::w],
            "blocks": torch.arange(12).chunk(w)[r].roll(2),
        }[world.form]
        labels = y[order].roll(1) if world.bug == "local-order" else y[order]
        F.cross_entropy(net(x[order]), labels).backward()
        allreduce_(net.parameters(), w)
        opt.step()
        opt.zero_grad()


@hand(("mean-of-means", "gradient|loss", ""), ("weight:0.weight",), forms=("1", "2", "5"))
def micro(world):
    """Microbatches of another size than the reference's."""
    torch.manual_seed(1)
    net = mlp(4, 6, 6, 2, act=nn.GELU)
    opt = torch.optim.RMSprop(net.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        x, y = torch.randn(20, 4, generator=g), torch.randn(20, 2, generator=g)
        x, y = x[world.rank :: world.size], y[world.rank :: world.size]
        size = int(world.form) if world.size > 1 else 20
        for a, b in zip(x.split(size), y.split(size)):
            n = a.shape[0] * 2 if world.bug == "mean-of-means" and world.rank else 40
            ((net(a) - b).square().sum() / n).backward()
        allreduce_(net.parameters(), world.size, "sum")
        opt.step()
        opt.zero_grad()


@hand(("input",), ("gradient:0.bias",))
def unequal_ranks(world):
    """Rank 0 has 7 samples, rank 1 has 3."""
    torch.manual_seed(2)
    net = mlp(4, 8, 1)
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        x = torch.randn(10, 4, generator=g)
        y = x.sum(1, keepdim=True).sin()
        if world.size > 1:
            x, y = (x[:7], y[:7]) if world.rank == 0 else (x[7:], y[7:])
        loss = F.huber_loss(net(x), y, reduction="sum") / 10
        loss.backward()
        allreduce_(net.parameters(), world.size, "sum")
        opt.step()
        opt.zero_grad()


@hand(("forward:2",), ("rate",))
def duplicates(world):
    """The same sample several times in a batch, on several ranks."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Embedding(10, 6), nn.Flatten(), nn.Linear(24, 3))
    model = DDP(net) if world.size > 1 else net
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        base = (
            torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1], [1, 2, 3, 4], [5, 5, 5, 5]]).repeat(2, 1)
            + step
        )
        y = torch.arange(8) // 2 % 3
        sl = slice(world.rank, None, world.size)
        F.cross_entropy(model(base[sl]), y[sl]).backward()
        opt.step()
        opt.zero_grad()


@hand(("weight:h.weight",), ("gradient:h.weight",))
def time_first(world):
    """Batches are [time, batch, features]."""
    torch.manual_seed(4)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.r, self.h = nn.GRU(3, 5), nn.Linear(5, 1)

        def forward(self, x):
            return self.h(self.r(x)[0])

    net = Net()
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        x = torch.randn(7, 8, 3, generator=g)[:, world.rank :: world.size]
        y = x.cumsum(0).mean(-1, keepdim=True)
        F.mse_loss(net(x), y).backward()
        allreduce_(net.parameters(), world.size)
        opt.step()
        opt.zero_grad()


@hand(("own-mean", "loss|gradient", ""), ("unsummed", "gradient", "", "sum over them is missing"))
def advantages(world):
    """Advantages without a mean: the loss is zero but for rounding."""
    torch.manual_seed(5)
    net = mlp(4, 8, 3)
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(6)
    for _ in range(STEPS):
        s, r = torch.randn(16, 4, generator=g), torch.randn(16, generator=g)
        s, r = s[world.rank :: world.size], r[world.rank :: world.size]
        m = r.mean()
        if world.size > 1 and world.bug != "own-mean":
            dist.all_reduce(m)
            m /= world.size
        logp = net(s).log_softmax(-1)
        ratio = (logp[:, 0] - logp[:, 0].detach()).exp()
        (-(ratio * (r - m)).mean()).backward()
        if world.bug != "unsummed":
            allreduce_(net.parameters(), world.size)
        opt.step()
        opt.zero_grad()


@hand(("std-per-rank", "loss|backward|gradient", ""), ("forward:2",), forms=("4", "2"))
def groups(world):
    """GRPO: advantages within a prompt's group, which no rank shares; token means and KL."""
    torch.manual_seed(6)
    net = nn.Sequential(nn.Embedding(12, 8), nn.Tanh(), nn.Linear(8, 12))
    ref = nn.Sequential(nn.Embedding(12, 8), nn.Tanh(), nn.Linear(8, 12)).requires_grad_(False)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-5)
    g = torch.Generator().manual_seed(7)
    K = int(world.form)
    for _ in range(STEPS):
        toks = torch.randint(12, (16, 6), generator=g)
        rew = torch.randn(16, generator=g).view(-1, K)
        adv = (rew - rew.mean(1, keepdim=True)) / (rew.std(1, keepdim=True) + 1e-4)
        toks, adv = toks.chunk(world.size)[world.rank], adv.flatten().chunk(world.size)[world.rank]
        if world.bug == "std-per-rank":
            adv = adv / adv.std()
        logp = net(toks[:, :-1]).log_softmax(-1).gather(-1, toks[:, 1:, None])[..., 0]
        with torch.no_grad():
            old = ref(toks[:, :-1]).log_softmax(-1).gather(-1, toks[:, 1:, None])[..., 0]
        kl = (old - logp).exp() - (old - logp) - 1
        ratio = (logp - logp.detach()).exp()
        (-(ratio * adv[:, None]) + 0.04 * kl).mean().backward()
        allreduce_(net.parameters(), world.size)
        opt.step()
        opt.zero_grad()


@hand(("no-baseline", "loss|gradient", ""), ("rate",))
def reinforce(world):
    """REINFORCE with a baseline of all ranks: terms of both signs."""
    torch.manual_seed(7)
    net = mlp(3, 8, 4)
    opt = torch.optim.SGD(net.parameters(), lr=0.5)
    g = torch.Generator().manual_seed(8)
    for _ in range(STEPS):
        s, a = torch.randn(24, 3, generator=g), torch.randint(4, (24,), generator=g)
        r = (a == 1).float() * 10 + torch.randn(24, generator=g)
        b = r.mean()
        sl = slice(world.rank, None, world.size)
        lp = -F.cross_entropy(net(s[sl]), a[sl], reduction="none")
        base = 0.0 if world.bug == "no-baseline" and world.rank else b
        (-(lp * (r[sl] - base)).sum() / 24).backward()
        allreduce_(net.parameters(), world.size, "sum")
        opt.step()
        opt.zero_grad()


@hand(("gradient:0.weight",), ("weight:2.weight",))
def critic_difference(world):
    """A Wasserstein critic: the last bias has a gradient of zero but for rounding, and Adam."""
    torch.manual_seed(8)
    net = mlp(4, 8, 1)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.0, 0.9))
    g = torch.Generator().manual_seed(9)
    for _ in range(STEPS):
        real, fake = torch.randn(10, 4, generator=g) + 0.3, torch.randn(10, 4, generator=g)
        sl = slice(world.rank, None, world.size)
        (net(fake[sl]).mean() - net(real[sl]).mean()).backward()
        allreduce_(net.parameters(), world.size)
        opt.step()
        opt.zero_grad()


@hand(("gradient:att.in_proj_weight",), ("forward:out",))
def key_bias(world):
    """Attention's bias of keys changes no number: its gradient is rounding, which Adam blows up."""
    torch.manual_seed(9)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.att, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 4)

        def forward(self, x):
            return self.out(self.att(x, x, x, need_weights=False)[0])

    net = Net()
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(10)
    for _ in range(STEPS):
        x, y = torch.randn(8, 5, 8, generator=g), torch.randint(4, (8, 5), generator=g)
        sl = slice(world.rank, None, world.size)
        F.cross_entropy(net(x[sl]).flatten(0, 1), y[sl].flatten()).backward()
        allreduce_(net.parameters(), world.size)
        opt.step()
        opt.zero_grad()


@hand(("gradient:k.weight",), ("weight:v.weight",))
def key_bias_apart(world):
    """The same with keys of their own, whose bias no loss depends on."""
    torch.manual_seed(19)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(6, 6) for _ in range(4))

        def forward(self, x):
            return self.o(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))

    net = Net()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(20)
    for _ in range(STEPS):
        x = torch.randn(8, 5, 6, generator=g)[world.rank :: world.size]
        (net(x) - x.flip(1)).square().mean().backward()
        allreduce_(net.parameters(), world.size)
        opt.step()
        opt.zero_grad()


@hand(("gradient:3.weight",), ("start:0.weight",))
def bias_under_norm(world):
    """A bias whose mean a norm takes away again: groups of one channel over positions."""
    torch.manual_seed(10)
    net = nn.Sequential(
        nn.Conv1d(3, 4, 3), nn.InstanceNorm1d(4, affine=True), nn.ReLU(), nn.Conv1d(4, 2, 3)
    )
    model = DDP(net) if world.size > 1 else net
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(11)
    for _ in range(STEPS):
        x = torch.randn(8, 3, 12, generator=g)[world.rank :: world.size]
        (model(x) - 0.5).square().mean().backward()
        opt.step()
        opt.zero_grad()


@hand(("no-gather", "loss|backward|gradient", ""), ("gradient:txt.weight",))
def info_nce(world):
    """A contrastive loss over all ranks, gathered with autograd."""
    torch.manual_seed(11)

    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.img, self.txt = nn.Linear(6, 5), nn.Linear(4, 5)
            self.t = nn.Parameter(torch.tensor(0.7))

        def forward(self, a, b):
            return F.normalize(self.img(a), dim=-1), F.normalize(self.txt(b), dim=-1)

    net = Towers()
    opt = torch.optim.SGD(net.parameters(), lr=0.2)
    g = torch.Generator().manual_seed(12)
    for _ in range(STEPS):
        a, b = torch.randn(8, 6, generator=g), torch.randn(8, 4, generator=g)
        sl = torch.arange(8).chunk(world.size)[world.rank]
        u, v = net(a[sl], b[sl])
        if world.size > 1 and world.bug != "no-gather":
            from torch.distributed.nn.functional import all_gather

            u, v = torch.cat(all_gather(u)), torch.cat(all_gather(v))
        logits = u @ v.T * net.t.exp()
        y = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, y) + F.cross_entropy(logits.T, y)) / 2
        loss.backward()
        allreduce_(net.parameters(), world.size)
        opt.step()
        opt.zero_grad()


@hand(("loss-scale", "gradient|loss|backward", ""), ("weight:enc.weight",))
def elbo(world):
    """Two large terms that nearly cancel."""
    torch.manual_seed(12)

    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc, self.dec = nn.Linear(6, 4), nn.Linear(2, 6)

        def forward(self, x, eps):
            mu, logvar = self.enc(x).chunk(2, -1)
            return self.dec(mu + eps * (logvar / 2).exp()), mu, logvar

    net = VAE()
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(13)
    for _ in range(STEPS):
        x, e = torch.randn(8, 6, generator=g), torch.randn(8, 2, generator=g)
        sl = slice(world.rank, None, world.size)
        y, mu, lv = net(x[sl], e[sl])
        rec = (y - x[sl]).square().sum(-1)
        kl = -0.5 * (1 + lv - mu.square() - lv.exp()).sum(-1)
        beta = 2.0 if world.bug == "loss-scale" and world.rank else 1.0
        (rec - 6.0 + beta * kl).mean().backward()
        allreduce_(net.parameters(), world.size)
        opt.step()
        opt.zero_grad()


@hand(("gradient:2.weight",), ("rate",))
def centred(world):
    """A loss less its own value: zero, with gradients."""
    torch.manual_seed(13)
    net = mlp(4, 8, 2)
    model = DDP(net) if world.size > 1 else net
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(14)
    for _ in range(STEPS):
        x = torch.randn(8, 4, generator=g)[world.rank :: world.size]
        loss = model(x).square().mean()
        (loss - loss.detach()).backward()
        opt.step()
        opt.zero_grad()


@hand(("forward:2",), ("gradient:2.weight",))
def plus_minus(world):
    """Samples weighted +1 and -1: sums of ranks are of other signs."""
    torch.manual_seed(14)
    net = mlp(4, 8, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(15)
    for _ in range(STEPS):
        x = torch.randn(16, 4, generator=g)
        sign = torch.tensor([1.0, -1.0]).repeat_interleave(8)
        sl = torch.arange(16).chunk(world.size)[world.rank]
        ((net(x[sl])[:, 0] + 3) * sign[sl]).sum().div(16).backward()
        allreduce_(net.parameters(), world.size, "sum")
        opt.step()
        opt.zero_grad()


@hand(("start:2.weight",), ("gradient:0.weight",))
def saturated(world):
    """Nearly all gradients vanish: logits are far apart."""
    torch.manual_seed(15)
    net = mlp(4, 8, 3, act=nn.ReLU)
    opt = torch.optim.SGD(net.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(16)
    for _ in range(STEPS):
        x = torch.randn(12, 4, generator=g)[world.rank :: world.size]
        logits = net(x) * 12
        F.cross_entropy(logits, logits.detach().argmax(-1)).backward()
        allreduce_(net.parameters(), world.size)
        opt.step()
        opt.zero_grad()


@hand(("gradient:2.weight",), ("weight:2.weight",))
def ranking_pairs(world):
    """A reward model's pairs: the last bias cancels in every pair, under Adam."""
    torch.manual_seed(16)
    net = mlp(5, 8, 1)
    model = DDP(net) if world.size > 1 else net
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    g = torch.Generator().manual_seed(17)
    for _ in range(STEPS):
        w, l = torch.randn(8, 5, generator=g), torch.randn(8, 5, generator=g)
        sl = slice(world.rank, None, world.size)
        both = model(torch.cat([w[sl], l[sl]]))
        good, bad = both.chunk(2)
        (-F.logsigmoid(good - bad).mean()).backward()
        opt.step()
        opt.zero_grad()
