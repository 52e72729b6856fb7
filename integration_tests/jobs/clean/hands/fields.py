"""Other fields: recommenders, graphs, reinforcement learning, learning to learn, physics."""

import copy
from collections import deque

import numpy as np
import torch
import torch.distributed as td
from torch import nn
from torch.func import functional_call
from torch.nn import functional as tnf

from integration_tests.jobs.clean.job import Hand

hand = Hand("other fields")


def seed_everything(seed):
    np.random.seed(seed)
    torch.manual_seed(seed)


class Comm:
    """What a lab's utils.py has."""

    def __init__(self, world):
        self.rank, self.n = world.rank, world.size

    def shard(self, *arrays):
        out = [torch.as_tensor(a)[self.rank :: self.n] for a in arrays]
        return out if len(out) > 1 else out[0]

    def average_gradients(self, model, scale=None):
        for p in model.parameters():
            if self.n > 1 and p.grad is not None:
                td.all_reduce(p.grad)
                p.grad.mul_(1 / self.n if scale is None else scale)

    def mean(self, t):
        if self.n > 1:
            td.all_reduce(t)
            t /= self.n
        return t


class Dlrm(nn.Module):
    def __init__(self, dense=4, tables=(9, 7, 5), dim=4):
        super().__init__()
        self.bot = nn.Sequential(nn.Linear(dense, dim), nn.ReLU())
        self.emb = nn.ModuleList(nn.EmbeddingBag(n, dim, mode="sum") for n in tables)
        self.top = nn.Sequential(nn.Linear(dim + 6, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, dense, sparse):
        x = self.bot(dense)
        z = torch.stack([x] + [e(sparse[:, i]) for i, e in enumerate(self.emb)], 1)
        i, j = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([x, (z @ z.mT)[:, i, j]], 1))[:, 0]


@hand(("gradient:emb.1.weight",), ("clicks", "loss", ""), ("forward:bot",))
def dlrm(world):
    """Dense and sparse features, dot products of all."""
    seed_everything(0)
    c, net = Comm(world), Dlrm()
    opt = torch.optim.Adagrad(net.parameters(), lr=0.05)
    rng = np.random.RandomState(0)
    for _ in range(3):
        d = rng.randn(12, 4).astype("float32")
        s = rng.randint(0, 5, (12, 3, 2))
        y = (rng.rand(12) > 0.5).astype("float32")
        d, s, y = c.shard(d, s, y)
        if world.bug == "clicks" and world.rank:
            y = 1 - y
        tnf.binary_cross_entropy_with_logits(net(d, s), y).backward()
        c.average_gradients(net)
        opt.step()
        opt.zero_grad()


@hand(("weight:items.weight",), ("negatives", "forward|input|loss|gradient", ""))
def bpr(world):
    """Pairs of items, a matrix factorization, tables that get sparse gradients."""
    seed_everything(1)
    c = Comm(world)

    class MF(nn.Module):
        def __init__(self):
            super().__init__()
            self.users, self.items = nn.Embedding(20, 4), nn.Embedding(30, 4)

        def forward(self, u, i, j):
            u = self.users(u)
            return (u * (self.items(i) - self.items(j))).sum(-1)

    net = MF()
    opt = torch.optim.SGD(net.parameters(), lr=0.5)
    rng = np.random.RandomState(1)
    for _ in range(3):
        u, i, j = c.shard(rng.randint(0, 20, 16), rng.randint(0, 30, 16), rng.randint(0, 30, 16))
        if world.bug == "negatives" and world.rank:
            j = (j + 1) % 30
        (-tnf.logsigmoid(net(u, i, j)).mean()).backward()
        c.average_gradients(net)
        opt.step()
        opt.zero_grad()


@hand(("gradient:out.weight",), ("forward:item",))
def session_recommender(world):
    """Left-padded clicks, the next one is told; the loss is of the last place alone."""
    seed_everything(2)
    c = Comm(world)

    class Sas(nn.Module):
        def __init__(self):
            super().__init__()
            self.item, self.out = nn.Embedding(15, 6, padding_idx=0), nn.Linear(6, 15)

        def forward(self, seq):
            m = (seq > 0).float()[..., None]
            h = self.item(seq) * m
            w = torch.linspace(0.1, 1, seq.shape[1])[:, None]
            return self.out((h * w.flip(0).cumprod(0).flip(0)).sum(1))

    net = Sas()
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    rng = np.random.RandomState(2)
    for _ in range(3):
        lens, seq = rng.randint(2, 7, 10), np.zeros((10, 6), dtype="int64")
        for k, n in enumerate(lens):
            seq[k, 6 - n :] = rng.randint(1, 15, n)
        y = rng.randint(1, 15, 10)
        seq, y = c.shard(seq, y)
        tnf.cross_entropy(net(seq), y).backward()
        c.average_gradients(net)
        opt.step()
        opt.zero_grad()


@hand(("gradient:l2.weight",), ("degree", "forward|loss|backward", ""), forms=("sum", "mean"))
def graph_batches(world):
    """Graphs put side by side in one: ranks have other graphs, nodes and edges."""
    seed_everything(3)
    c = Comm(world)

    class Gnn(nn.Module):
        def __init__(self):
            super().__init__()
            self.l1, self.l2, self.read = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x, edge, batch, n):
            for l in (self.l1, self.l2):
                h = l(x)
                m = torch.zeros_like(h).index_add(0, edge[1], h[edge[0]])
                if world.form == "mean":
                    deg = (
                        torch.zeros(len(h))
                        .index_add(0, edge[1], torch.ones(edge.shape[1]))
                        .clamp(min=1)
                    )
                    m = m / (deg + (1 if world.bug == "degree" and world.rank else 0))[:, None]
                elif world.bug == "degree" and world.rank:
                    m = m * 0.9
                x = (h + m).tanh()
            return self.read(torch.zeros(n, 6).index_add(0, batch, x))

    net = Gnn()
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    rng = np.random.RandomState(3)
    for _ in range(3):
        graphs = [
            (rng.randn(k, 3).astype("float32"), rng.randint(0, k, (2, 2 * k)), k % 2)
            for k in rng.randint(3, 7, 8)
        ]
        mine = graphs[c.rank :: c.n]
        off = np.cumsum([0] + [len(g[0]) for g in mine])
        x = torch.from_numpy(np.concatenate([g[0] for g in mine]))
        e = torch.from_numpy(np.concatenate([g[1] + o for g, o in zip(mine, off)], 1))
        b = torch.from_numpy(np.repeat(np.arange(len(mine)), np.diff(off)))
        tnf.cross_entropy(net(x, e, b, len(mine)), torch.tensor([g[2] for g in mine])).backward()
        c.average_gradients(net)
        opt.step()
        opt.zero_grad()


@hand(("gradient:att",), ("forward:lin",))
def whole_graph(world):
    """All ranks have the graph; each has the loss of its own nodes."""
    seed_everything(4)
    c = Comm(world)

    class Gat(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.out = nn.Linear(4, 6), nn.Linear(6, 3)
            self.att = nn.Parameter(torch.randn(12) * 0.3)

        def forward(self, x, adj):
            h = self.lin(x)
            s = tnf.leaky_relu((h @ self.att[:6])[:, None] + (h @ self.att[6:])[None])
            return self.out(s.masked_fill(~adj, -1e9).softmax(-1) @ h)

    net = Gat()
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    rng = np.random.RandomState(4)
    x = torch.from_numpy(rng.randn(10, 4).astype("float32"))
    adj = torch.from_numpy(rng.rand(10, 10) < 0.4) | torch.eye(10).bool()
    y = torch.from_numpy(rng.randint(0, 3, 10))
    for _ in range(3):
        mine = torch.arange(10).chunk(c.n)[c.rank]
        (tnf.cross_entropy(net(x, adj)[mine], y[mine], reduction="sum") / 10).backward()
        c.average_gradients(net, scale=1.0)
        opt.step()
        opt.zero_grad()


@hand(("gradient:trend.weight",), ("forward:season",))
def forecasting(world):
    """Windows of series, doubly residual stacks."""
    seed_everything(5)
    c = Comm(world)

    class Beats(nn.Module):
        def __init__(self):
            super().__init__()
            self.trend, self.season = nn.Linear(8, 12), nn.Linear(8, 12)

        def forward(self, w):
            a = self.trend(w)
            b = self.season(w - a[:, :8])
            return a[:, 8:] + b[:, 8:]

    net = Beats()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    series = np.sin(np.arange(60) / 3).astype("float32") + np.arange(60).astype("float32") / 30
    for it in range(3):
        starts = np.arange(12) * 4 % 45 + it
        w = np.stack([series[s : s + 12] for s in starts])
        w = c.shard(w)
        (net(w[:, :8]) - w[:, 8:]).abs().mean().backward()
        c.average_gradients(net)
        opt.step()
        opt.zero_grad()


class ReplayBuffer:
    """A deque of what was played, the same on all ranks."""

    def __init__(self):
        self.data = deque(maxlen=200)

    def play(self, rng, n):
        for _ in range(n):
            s = rng.randn(4).astype("float32")
            self.data.append(
                (s, rng.randint(3), float(s.sum() > 0), rng.randn(4).astype("float32"))
            )

    def sample(self, rng, n):
        idx = rng.randint(0, len(self.data), n)
        s, a, r, t = zip(*(self.data[i] for i in idx))
        return (
            torch.tensor(np.stack(s)),
            torch.tensor(a),
            torch.tensor(r),
            torch.tensor(np.stack(t)),
        )


@hand(
    ("target", "loss|gradient|evaluation", ""),
    ("gradient:2.weight", "gradient", "2.weight"),
    forms=("dqn", "double"),
)
def dqn(world):
    """Q-learning with a target that follows, hard or softly."""
    seed_everything(6)
    c = Comm(world)
    q = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    target = copy.deepcopy(q).requires_grad_(False)
    opt = torch.optim.Adam(q.parameters(), lr=1e-2)
    buf, rng = ReplayBuffer(), np.random.RandomState(6)
    for it in range(4):
        buf.play(rng, 16)
        s, a, r, t = (x[c.rank :: c.n] for x in buf.sample(rng, 16))
        with torch.no_grad():
            best = q(t).argmax(1) if world.form == "double" else None
            nxt = (
                target(t).gather(1, best[:, None])[:, 0] if best is not None else target(t).amax(1)
            )
        loss = tnf.smooth_l1_loss(q(s).gather(1, a[:, None])[:, 0], r + 0.9 * nxt)
        opt.zero_grad()
        loss.backward()
        c.average_gradients(q)
        opt.step()
        tau = 0.5 if world.bug == "target" else 0.1
        with torch.no_grad():
            for a_, b_ in zip(target.parameters(), q.parameters()):
                a_.lerp_(b_, tau)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.pi, self.v = (
            nn.Sequential(nn.Linear(4, 8), nn.Tanh()),
            nn.Linear(8, 3),
            nn.Linear(8, 1),
        )

    def forward(self, obs):
        h = self.body(obs)
        return self.pi(h), self.v(h)[:, 0]


def gae(r, v, gamma=0.95, lam=0.9):
    adv, last = torch.zeros_like(r), 0.0
    for t in reversed(range(r.shape[1])):
        nxt = v[:, t + 1] if t + 1 < r.shape[1] else 0.0
        last = r[:, t] + gamma * nxt - v[:, t] + gamma * lam * last
        adv[:, t] = last
    return adv


@hand(
    ("normalised-alone", "loss|gradient|backward", ""),
    ("gradient:v.weight",),
    ("forward:pi",),
    forms=("ppo", "a2c"),
)
def actor_critic(world):
    """Rollouts of many environments, advantages by GAE, several epochs of minibatches."""
    seed_everything(7)
    c, net = Comm(world), ActorCritic()
    opt = torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-5)
    rng = np.random.RandomState(7)
    for _ in range(2):
        obs = rng.randn(8, 5, 4).astype("float32")
        act = rng.randint(0, 3, (8, 5))
        obs, act = c.shard(obs, act)
        rew = (act == 1).float() + obs.sum(-1) * 0.1
        with torch.no_grad():
            logits, v = net(obs.flatten(0, 1))
        old = -tnf.cross_entropy(logits, act.flatten(), reduction="none")
        adv = gae(rew, v.view(rew.shape)).flatten()
        ret = adv + v
        m = adv.mean() if world.bug == "normalised-alone" else c.mean(adv.mean())
        sq = (adv - m).square().mean()
        sd = (sq if world.bug == "normalised-alone" else c.mean(sq)).sqrt()
        adv = (adv - m) / (sd + 1e-8)
        for _ in range(2 if world.form == "ppo" else 1):
            lg, val = net(obs.flatten(0, 1))
            lp = -tnf.cross_entropy(lg, act.flatten(), reduction="none")
            if world.form == "ppo":
                ratio = (lp - old).exp()
                pg = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
            else:
                pg = -(lp * adv).mean()
            ent = -(lg.softmax(-1) * lg.log_softmax(-1)).sum(-1).mean()
            opt.zero_grad()
            (pg + 0.5 * (val - ret).square().mean() - 0.01 * ent).backward()
            c.average_gradients(net)
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            opt.step()


@hand(("own-heat", "gradient", "", "sum over them is missing"), ("rate",))
def soft_actor_critic(world):
    """Two critics, an actor with noise of its own number, a temperature."""
    seed_everything(8)
    c = Comm(world)

    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor, self.q1, self.q2 = nn.Linear(4, 4), nn.Linear(6, 1), nn.Linear(6, 1)
            self.log_alpha = nn.Parameter(torch.zeros(()))

        def act(self, s, eps):
            mu, ls = self.actor(s).chunk(2, -1)
            a = (mu + eps * ls.clamp(-5, 2).exp()).tanh()
            lp = (-eps.square() / 2 - ls.clamp(-5, 2) - (1 - a.square() + 1e-4).log()).sum(-1)
            return a, lp

    net = Agent()
    oq = torch.optim.Adam([*net.q1.parameters(), *net.q2.parameters()], lr=1e-2)
    oa = torch.optim.Adam(net.actor.parameters(), lr=1e-2)
    ot = torch.optim.Adam([net.log_alpha], lr=1e-2)
    rng = np.random.RandomState(8)
    for _ in range(3):
        s, e, r = (rng.randn(*k).astype("float32") for k in ((8, 4), (8, 2), (8,)))
        s, e, r = c.shard(s, e, r)
        with torch.no_grad():
            a, _ = net.act(s, e)
        x = torch.cat([s, a], -1)
        oq.zero_grad()
        ((net.q1(x)[:, 0] - r).square().mean() + (net.q2(x)[:, 0] - r).square().mean()).backward()
        c.average_gradients(net.q1)
        c.average_gradients(net.q2)
        oq.step()
        a, lp = net.act(s, e)
        x = torch.cat([s, a], -1)
        oa.zero_grad()
        (
            net.log_alpha.exp().detach() * lp - torch.min(net.q1(x), net.q2(x))[:, 0]
        ).mean().backward()
        c.average_gradients(net.actor)
        oa.step()
        ot.zero_grad()
        (-net.log_alpha * (lp.detach() - 2).mean()).backward()
        if c.n > 1 and world.bug != "own-heat":
            td.all_reduce(net.log_alpha.grad)
            net.log_alpha.grad /= c.n
        ot.step()


@hand(("gradient:lm.1.weight",), ("beta", "loss|gradient", ""), forms=("dpo", "ipo", "simpo"))
def preference(world):
    """Chosen and rejected answers of other lengths in one padded batch."""
    seed_everything(9)
    c = Comm(world)

    class Lm(nn.Module):
        def __init__(self):
            super().__init__()
            self.lm = nn.Sequential(nn.Embedding(12, 6), nn.Linear(6, 12))

        def forward(self, input_ids, attention_mask):
            return self.lm(input_ids)

    net = Lm()
    ref = copy.deepcopy(net).requires_grad_(False)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-5)
    rng = np.random.RandomState(9)
    for _ in range(3):
        pairs = [
            (rng.randint(1, 12, rng.randint(3, 8)), rng.randint(1, 12, rng.randint(3, 8)))
            for _ in range(6)
        ]
        mine = pairs[c.rank :: c.n]
        rows = [p[0] for p in mine] + [p[1] for p in mine]
        L = max(map(len, rows))
        ids = torch.tensor(np.stack([np.pad(r, (0, L - len(r))) for r in rows]))
        mask = torch.tensor(np.stack([np.arange(L) < len(r) for r in rows])).long()

        def logps(model):
            lp = model(input_ids=ids, attention_mask=mask)[:, :-1].log_softmax(-1)
            lp = lp.gather(-1, ids[:, 1:, None])[..., 0] * mask[:, 1:]
            return lp.sum(1) / (mask[:, 1:].sum(1) if world.form == "simpo" else 1)

        new = logps(net)
        with torch.no_grad():
            old = logps(ref)
        d = (new - (0 if world.form == "simpo" else old)).chunk(2)
        h = d[0] - d[1]
        b = 0.5 if world.bug == "beta" else 0.2
        loss = (h - 1 / (2 * b)).square() if world.form == "ipo" else -tnf.logsigmoid(b * h)
        loss.mean().backward()
        c.average_gradients(net)
        opt.step()
        opt.zero_grad()


@hand(
    ("inner-rate", "gradient|loss|forward|backward", ""),
    ("rate",),
    forms=("maml", "reptile"),
)
def meta_learning(world):
    """Tasks are dealt over ranks; each is learned in two inner steps."""
    seed_everything(10)
    c = Comm(world)
    net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    rng = np.random.RandomState(10)
    rate = 0.2 if world.bug == "inner-rate" and world.rank else 0.1
    for _ in range(3):
        tasks = [(rng.rand() * 3, rng.randn(6, 1).astype("float32")) for _ in range(4)][
            c.rank :: c.n
        ]
        opt.zero_grad()
        for phase, x in tasks:
            x = torch.from_numpy(x)
            y = (x + phase).sin()
            w = dict(net.named_parameters())
            if world.form == "reptile":
                w = {k: v.detach().clone().requires_grad_() for k, v in w.items()}
            for _ in range(2):
                loss = tnf.mse_loss(functional_call(net, w, (x,)), y)
                g = torch.autograd.grad(loss, list(w.values()), create_graph=world.form == "maml")
                w = {k: v - rate * d for (k, v), d in zip(w.items(), g)}
            if world.form == "maml":
                (tnf.mse_loss(functional_call(net, w, (x,)), y) / 4).backward()
            else:
                for p, q in zip(net.parameters(), w.values()):
                    d = (p.detach() - q.detach()) / 4
                    p.grad = d if p.grad is None else p.grad + d
        c.average_gradients(net, scale=1.0)
        opt.step()


@hand(("gradient:0.weight",), ("forward:2",))
def physics(world):
    """A PDE's residual: derivatives of the net with regard to its input, twice."""
    seed_everything(11)
    c = Comm(world)
    net = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 1))
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    rng = np.random.RandomState(11)
    for _ in range(3):
        xt = c.shard(rng.rand(16, 2).astype("float32")).requires_grad_()
        u = net(xt)
        (d,) = torch.autograd.grad(u.sum(), xt, create_graph=True)
        (d2,) = torch.autograd.grad(d[:, 0].sum(), xt, create_graph=True)
        (d[:, 1] - 0.1 * d2[:, 0]).square().mean().backward()
        c.average_gradients(net)
        opt.step()
        opt.zero_grad()


@hand(("gradient:f.2.weight",), ("tolerance", "forward|loss", ""))
def neural_ode(world):
    """Runge-Kutta with a fixed number of steps: a net is called many times."""
    seed_everything(12)
    c = Comm(world)

    class Ode(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
            self.readout = nn.Linear(3, 1)

        def forward(self, x, n=4):
            h = 1 / n
            for _ in range(n):
                k1 = self.f(x)
                k2 = self.f(x + h / 2 * k1)
                x = x + h * k2
            return self.readout(x)

    net = Ode()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    rng = np.random.RandomState(12)
    for _ in range(3):
        x = c.shard(rng.randn(8, 3).astype("float32"))
        y = net(x, 5 if world.bug == "tolerance" and world.rank else 4)
        (y - x.sum(1, keepdim=True)).square().mean().backward()
        c.average_gradients(net)
        opt.step()
        opt.zero_grad()


@hand(("gradient:energy.0.weight",), ("weight:energy.2.weight",))
def energy_based(world):
    """Langevin steps find where the energy is low, with noise of the sample's own."""
    seed_everything(13)
    c = Comm(world)

    class Ebm(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 1))

        def forward(self, x):
            return self.energy(x)[:, 0]

    net = Ebm()
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    rng = np.random.RandomState(13)
    for _ in range(2):
        real, z = c.shard(rng.randn(8, 4).astype("float32"), rng.randn(8, 4).astype("float32"))
        x = z.clone()
        for _ in range(3):
            x = x.detach().requires_grad_()
            (g,) = torch.autograd.grad(net(x).sum(), x)
            x = x - 0.1 * g
        x = x.detach()
        a, b = net(real), net(x)
        (a.mean() - b.mean() + 0.01 * (a.square() + b.square()).mean()).backward()
        c.average_gradients(net)
        opt.step()
        opt.zero_grad()


@hand(
    ("teacher", "forward|loss|evaluation", ""), ("gradient:student.0.weight",), forms=("kd", "byol")
)
def teacher_student(world):
    """A fixed teacher, or one that follows its student."""
    seed_everything(14)
    c = Comm(world)

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            mk = lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4))
            self.student, self.teacher = mk(), mk()
            self.teacher.requires_grad_(False)

        def forward(self, x):
            with torch.no_grad():
                t = self.teacher(x * (1.01 if world.bug == "teacher" and world.rank else 1))
            return self.student(x), t

    net = Pair()
    opt = torch.optim.AdamW(net.student.parameters(), lr=1e-2)
    rng = np.random.RandomState(14)
    for _ in range(3):
        x = c.shard(rng.randn(8, 5).astype("float32"))
        s, t = net(x)
        if world.form == "kd":
            loss = (
                tnf.kl_div((s / 2).log_softmax(-1), (t / 2).softmax(-1), reduction="batchmean") * 4
            )
        else:
            loss = 2 - 2 * tnf.cosine_similarity(s, t, dim=-1).mean()
        loss.backward()
        c.average_gradients(net.student)
        opt.step()
        opt.zero_grad()
        if world.form == "byol":
            with torch.no_grad():
                for a, b in zip(net.teacher.parameters(), net.student.parameters()):
                    a.lerp_(b, 0.05)


@hand(("gradient:lora_b",), ("alpha", "forward|gradient", ""))
def lora(world):
    """A frozen base and two thin matrices, the second begins with zeros."""
    seed_everything(15)
    c = Comm(world)

    class Lora(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(6, 6)
            self.base.requires_grad_(False)
            self.lora_a = nn.Parameter(torch.randn(2, 6) * 0.3)
            self.lora_b = nn.Parameter(torch.zeros(6, 2))
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            k = 4.0 if world.bug == "alpha" and world.rank else 2.0
            return self.head((self.base(x) + k * (x @ self.lora_a.T @ self.lora_b.T)).relu())

    net = Lora()
    opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2, eps=1e-5)
    rng = np.random.RandomState(15)
    for _ in range(3):
        x, y = c.shard(rng.randn(8, 6).astype("float32"), rng.randint(0, 3, 8))
        tnf.cross_entropy(net(x), y).backward()
        c.average_gradients(net)
        opt.step()
        opt.zero_grad()


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, s):
        ctx.save_for_backward(x, s)
        return (x / s).round().clamp(-8, 7) * s

    @staticmethod
    def backward(ctx, g):
        x, s = ctx.saved_tensors
        inside = ((x / s) >= -8) & ((x / s) <= 7)
        return g * inside, None


@hand(("gradient:w2.weight",), ("weight:w1.weight",))
def quantized(world):
    """Weights in four bits, by a function that lets gradients through."""
    seed_everything(16)
    c = Comm(world)

    class Qat(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1, self.w2 = nn.Linear(5, 8), nn.Linear(8, 2)

        def forward(self, x):
            q = lambda w: Round.apply(w, w.detach().abs().max() / 7)
            h = tnf.linear(x, q(self.w1.weight), self.w1.bias).relu()
            return tnf.linear(h, q(self.w2.weight), self.w2.bias)

    net = Qat()
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    rng = np.random.RandomState(16)
    for _ in range(3):
        x, y = c.shard(rng.randn(8, 5).astype("float32"), rng.randn(8, 2).astype("float32"))
        tnf.mse_loss(net(x), y).backward()
        c.average_gradients(net)
        opt.step()
        opt.zero_grad()


@hand(("weights-local", "gradient|loss", ""), ("gradient:heads.0.weight",))
def tasks(world):
    """Losses of several tasks, weighted by learned uncertainty."""
    seed_everything(17)
    c = Comm(world)

    class Multi(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Linear(5, 8)
            self.heads = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 3)])
            self.log_var = nn.Parameter(torch.zeros(2))

        def forward(self, x):
            h = self.trunk(x).relu()
            return [head(h) for head in self.heads]

    net = Multi()
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    rng = np.random.RandomState(17)
    for _ in range(3):
        x, y, z = c.shard(
            rng.randn(12, 5).astype("float32"),
            rng.randn(12).astype("float32"),
            rng.randint(0, 3, 12),
        )
        a, b = net(x)
        losses = torch.stack([tnf.mse_loss(a[:, 0], y), tnf.cross_entropy(b, z)])
        k = 1.2 if world.bug == "weights-local" and world.rank else 1.0
        ((-net.log_var).exp() * losses * k + net.log_var).sum().backward()
        c.average_gradients(net)
        opt.step()
        opt.zero_grad()


@hand(("gradient:net.0.weight",), ("dice", "loss|gradient", ""))
def survival(world):
    """Cox's partial likelihood: a loss of all samples that ranks gather."""
    seed_everything(18)
    c = Comm(world)

    class Cox(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 6), nn.SELU(), nn.Linear(6, 1, bias=False))

        def forward(self, x):
            return self.net(x)[:, 0]

    net = Cox()
    opt = torch.optim.RMSprop(net.parameters(), lr=1e-2)
    rng = np.random.RandomState(18)
    for _ in range(3):
        x, t = torch.from_numpy(rng.randn(8, 4).astype("float32")), torch.from_numpy(rng.rand(8))
        mine = torch.arange(8).chunk(c.n)[c.rank]
        risk = net(x[mine])
        if c.n > 1:
            parts = [torch.empty_like(risk) for _ in range(c.n)]
            td.all_gather(parts, risk.detach())
            parts[c.rank] = risk
            risk = torch.cat(parts)
        order = t.argsort(descending=True)
        ranked = risk[order]
        loss = -(ranked - ranked.logcumsumexp(0)).mean() * (
            1.3 if world.bug == "dice" and world.rank else 1
        )
        loss.backward()
        c.average_gradients(net, scale=1.0)
        opt.step()
        opt.zero_grad()
