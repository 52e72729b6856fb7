"""Loops around a model: accumulation, averages of weights, optimizers, dtypes, evaluation."""

import copy
import math
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from integration_tests.jobs.clean.job import Hand

hand = Hand("training loops")


class Net(nn.Module):
    def __init__(self, vocab=16, dim=8, norm=True):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.fc = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(2 * dim, dim)
        self.ln = nn.LayerNorm(dim) if norm else nn.Identity()
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, idx, targets=None):
        x = self.wte(idx)
        x = self.ln(x + self.proj(F.gelu(self.fc(x))))
        logits = self.lm_head(x)
        if targets is None:
            return logits
        return logits, F.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1
        )


def batches(world, n, bs=8, T=6, seed=0, share=True):
    g = torch.Generator().manual_seed(seed)
    for _ in range(n):
        d = torch.randint(16, (bs, T + 1), generator=g)
        if share:
            d = d[world.rank :: world.size]
        yield d[:, :-1], d[:, 1:]


def wrap(world, net, **kw):
    return DistributedDataParallel(net, **kw) if world.size > 1 else net


@hand(
    ("forgot-divide", "gradient", "", "times"),
    ("forward:proj",),
    ("gradient:lm_head.weight",),
    forms=("2", "4"),
)
def accumulate(world):
    """nanoGPT's way: require_backward_grad_sync on the last micro step."""
    torch.manual_seed(0)
    net = Net()
    model = wrap(world, net)
    opt = optim.AdamW(net.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    k = int(world.form)
    for x, y in batches(world, 3):
        micro = 1 if world.size == 1 else k
        for i, (a, b) in enumerate(zip(x.chunk(micro), y.chunk(micro))):
            if world.size > 1:
                model.require_backward_grad_sync = i == micro - 1
            _, loss = model(a, b)
            (loss if world.bug == "forgot-divide" else loss / micro).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)


@hand(("mean-of-means", "gradient|loss", ""), ("weight:wte.weight",))
def tokens_weighted(world):
    """Targets are left out unevenly; one denominator for all ranks and microbatches."""
    torch.manual_seed(1)
    net = Net()
    opt = optim.AdamW(net.parameters(), lr=1e-2)
    for x, y in batches(world, 3):
        y = y.masked_fill((x + y) % 3 == 0, -1)
        n = (y != -1).sum()
        if world.size > 1:
            dist.all_reduce(n)
        for a, b in zip(x.split(3), y.split(3)):
            logits = net(a)
            s = F.cross_entropy(logits.flatten(0, 1), b.flatten(), ignore_index=-1, reduction="sum")
            own = (b != -1).sum() * 3 * world.size if world.bug == "mean-of-means" else n
            (s / own).backward()
        for p in net.parameters():
            if world.size > 1:
                dist.all_reduce(p.grad)
        opt.step()
        opt.zero_grad()


@hand(("tokens-local", "gradient", ""), ("gradient:fc.weight",))
def scaled_at_the_end(world):
    """Gradients of summed losses, divided by all tokens right before the update."""
    torch.manual_seed(2)
    net = Net()
    opt = optim.AdamW(net.parameters(), lr=1e-2, eps=1e-6)
    for x, y in batches(world, 3):
        total = torch.tensor(0.0)
        for a, b in zip(x.split(1), y.split(1)):
            b = b[:, : 3 + int(a[0, 0]) % 3]
            out = net(a)[:, : b.shape[1]]
            F.cross_entropy(out.flatten(0, 1), b.flatten(), reduction="sum").backward()
            total += b.numel()
        local = total.clone()
        if world.size > 1:
            dist.all_reduce(total)
            for p in net.parameters():
                dist.all_reduce(p.grad)
        for p in net.parameters():
            p.grad /= local if world.bug == "tokens-local" else total
        opt.step()
        opt.zero_grad()


@hand(("aux-summed", "gradient|loss", ""), ("forward:wte",))
def auxiliary(world):
    """A z-loss beside the loss, over accumulated microbatches."""
    torch.manual_seed(3)
    net = Net()
    model = wrap(world, net)
    opt = optim.Adam(net.parameters(), lr=1e-2)
    for x, y in batches(world, 3):
        for i in range(2):
            with model.no_sync() if world.size > 1 and i == 0 else nullcontext():
                logits, loss = model(x.chunk(2)[i], y.chunk(2)[i])
                z = logits.logsumexp(-1).square()
                z = z.sum() / 10 if world.bug == "aux-summed" else z.mean()
                (loss / 2 + 1e-2 * z / 2).backward()
        opt.step()
        opt.zero_grad()


@hand(("decay", "evaluation", ""), ("weight:fc.bias",), forms=("swa", "copy", "late"))
def ema(world):
    """An average of weights, by torch's class or by hand, that is evaluated now and then."""
    torch.manual_seed(4)
    net = Net()
    model = wrap(world, net)
    opt = optim.AdamW(net.parameters(), lr=1e-2)
    beta = 0.5 if world.bug == "decay" else 0.9
    avg = (
        AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(beta))
        if world.form == "swa"
        else copy.deepcopy(net)
    )
    for it, (x, y) in enumerate(batches(world, 4)):
        model(x, y)[1].backward()
        opt.step()
        opt.zero_grad()
        if world.form == "swa":
            avg.update_parameters(net)
        else:
            b = min(beta, (1 + it) / (10 + it)) if world.form == "late" and not world.bug else beta
            with torch.no_grad():
                for a, p in zip(avg.parameters(), net.parameters()):
                    a.lerp_(p, 1 - b)
        if it % 2:
            avg.eval()
            with torch.no_grad():
                avg(x)


@hand(("second-rate", "learning rate|weight", ""), ("gradient:b.weight",))
def two_optimizers(world):
    """Adam for one half, SGD for the other, stepped one after the other."""
    torch.manual_seed(5)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.b(self.a(x).relu())

    net = Two()
    model = wrap(world, net)
    o1 = optim.Adam(net.a.parameters(), lr=1e-2)
    o2 = optim.SGD(net.b.parameters(), lr=2e-1 if world.bug == "second-rate" else 1e-1)
    g = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(8, 4, generator=g)[world.rank :: world.size]
        model(x).square().mean().backward()
        o1.step()
        o2.step()
        o1.zero_grad()
        o2.zero_grad()


GROUPS = ("decay-all", "weight", "ln|bias")


@hand(GROUPS, ("rate",), forms=("cosine", "onecycle", "warmup"))
def groups_and_rates(world):
    """Groups with and without decay; a schedule of rates."""
    torch.manual_seed(6)
    net = Net()
    model = wrap(world, net)
    dec = [p for p in net.parameters() if p.ndim > 1]
    non = [p for p in net.parameters() if p.ndim < 2]
    wd = 0.5 if world.bug == "decay-all" else 0.0
    opt = optim.AdamW(
        [{"params": dec, "weight_decay": 0.1}, {"params": non, "weight_decay": wd}], lr=1e-2
    )
    sched = {
        "cosine": lambda: CosineAnnealingLR(opt, 4),
        "onecycle": lambda: OneCycleLR(opt, 2e-2, total_steps=5),
        "warmup": lambda: SequentialLR(
            opt, [LambdaLR(opt, lambda s: (s + 1) / 2), CosineAnnealingLR(opt, 3)], [2]
        ),
    }[world.form]()
    for x, y in batches(world, 4):
        model(x, y)[1].backward()
        opt.step()
        sched.step()
        opt.zero_grad()


class Lion(optim.Optimizer):
    """Sign of an average."""

    def __init__(self, params, lr=1e-3, b1=0.9, b2=0.99):
        super().__init__(params, {"lr": lr, "b1": b1, "b2": b2})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.add_(m.lerp(p.grad, 1 - group["b1"]).sign(), alpha=-group["lr"])
                m.lerp_(p.grad, 1 - group["b2"])


class Lamb(optim.Optimizer):
    """Layers' own trust ratios."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                s["t"] += 1
                s["m"].lerp_(p.grad, 0.1)
                s["v"].lerp_(p.grad.square(), 0.01)
                u = s["m"] / (1 - 0.9 ** s["t"]) / ((s["v"] / (1 - 0.99 ** s["t"])).sqrt() + 1e-4)
                ratio = p.norm() / u.norm() if p.norm() > 0 and u.norm() > 0 else 1.0
                p.add_(u * ratio, alpha=-group["lr"])


OPTS = (
    "nesterov",
    "adamax",
    "nadam",
    "radam",
    "adadelta",
    "asgd",
    "rprop",
    "lamb",
    "lion",
    "amsgrad",
    "maximize",
    "fused",
)


@hand(("gradient:proj.weight",), ("weight:ln.weight",), forms=OPTS)
def optimizers(world):
    """Each optimizer under DDP."""
    torch.manual_seed(7)
    net = Net()
    model = wrap(world, net)
    p = net.parameters()
    opt = {
        "nesterov": lambda: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        "adamax": lambda: optim.Adamax(p, lr=1e-2, eps=1e-5),
        "nadam": lambda: optim.NAdam(p, lr=1e-2, eps=1e-5),
        "radam": lambda: optim.RAdam(p, lr=1e-2),
        "adadelta": lambda: optim.Adadelta(p),
        "asgd": lambda: optim.ASGD(p, lr=0.1),
        "rprop": lambda: optim.Rprop(p, lr=1e-3),
        "lamb": lambda: Lamb(p),
        "lion": lambda: Lion(p),
        "amsgrad": lambda: optim.Adam(p, lr=1e-2, amsgrad=True, eps=1e-5),
        "maximize": lambda: optim.Adam(p, lr=1e-2, maximize=True, eps=1e-5),
        "fused": lambda: optim.AdamW(p, lr=1e-2, fused=True, eps=1e-5),
    }[world.form]()
    for x, y in batches(world, 3):
        model(x, y)[1].backward()
        opt.step()
        opt.zero_grad()


@hand(("forward:fc",), ("gradient:lm_head.weight",))
def evaluated(world):
    """Evaluation between updates, with another batch size, of which ranks have parts."""
    torch.manual_seed(8)
    net = Net()
    model = wrap(world, net)
    opt = optim.AdamW(net.parameters(), lr=1e-2)
    val = list(batches(world, 2, bs=12, seed=99))
    for x, y in batches(world, 3):
        model.train()
        model(x, y)[1].backward()
        opt.step()
        opt.zero_grad()
        model.eval()
        with torch.no_grad():
            losses = torch.stack([net(a, b)[1] for a, b in val])
        if world.size > 1:
            dist.all_reduce(losses)


@hand(("gradient:fc.weight",), ("forward:fc",))
def bf16_autocast(world):
    """Under autocast to bfloat16."""
    torch.manual_seed(9)
    net = Net()
    model = wrap(world, net)
    opt = optim.AdamW(net.parameters(), lr=1e-3)
    for x, y in batches(world, 3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x, y)[1]
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad()


@hand(
    ("not-unscaled", "gradient norm|clipped gradient|gradient", ""),
    ("weight:proj.weight",),
    forms=("", "growing", "overflow"),
)
def grad_scaler(world):
    """A GradScaler: scaled losses, unscaled before clipping; some steps overflow."""
    torch.manual_seed(10)
    net = Net()
    model = wrap(world, net)
    opt = optim.SGD(net.parameters(), lr=0.1)
    more = {"growing": {"growth_interval": 1}, "overflow": {"init_scale": 2.0**127}}.get(
        world.form, {}
    )
    scaler = torch.amp.GradScaler("cpu", **({"init_scale": 2.0**12} | more))
    for x, y in batches(world, 4):
        loss = model(x, y)[1]
        scaler.scale(loss).backward()
        if world.bug != "not-unscaled":
            scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()


@hand(("forward:ln",), ("counted-twice", "gradient", "", "2 times"))
def master_copies(world):
    """A bfloat16 model, float32 copies that are updated, and copied back."""
    torch.manual_seed(11)
    net = Net().bfloat16()
    master = [p.detach().float().requires_grad_() for p in net.parameters()]
    opt = optim.AdamW(master, lr=1e-2)
    for x, y in batches(world, 3):
        net(x, y)[1].backward()
        for m, p in zip(master, net.parameters()):
            g = p.grad.float()
            if world.size > 1:
                dist.all_reduce(g)
                g /= 1 if world.bug == "counted-twice" else world.size
            m.grad, p.grad = g, None
        opt.step()
        with torch.no_grad():
            for m, p in zip(master, net.parameters()):
                p.copy_(m)


@hand(("gradient:fc.weight",), ("rate",))
def offloaded(world):
    """Activations wait on the host, by torch's context."""
    torch.manual_seed(12)
    net = Net()
    model = wrap(world, net)
    opt = optim.AdamW(net.parameters(), lr=1e-2)
    for x, y in batches(world, 3):
        with torch.autograd.graph.save_on_cpu():
            loss = model(x, y)[1]
        loss.backward()
        opt.step()
        opt.zero_grad()


@hand(("gradient:lm_head.weight",), ("weight:fc.weight",), forms=("part", "whole", "loss"))
def compiled(world):
    """A part, or all, is compiled; the backend runs eagerly."""
    torch.manual_seed(13)
    net = Net()
    f = ce = F.cross_entropy
    if world.size > 1 and world.form == "part":
        net.fc.compile(backend="eager")
    if world.size > 1 and world.form == "loss":
        f = torch.compile(ce, backend="eager")
    model = wrap(world, net)
    if world.size > 1 and world.form == "whole":
        model = torch.compile(model, backend="eager")
    opt = optim.AdamW(net.parameters(), lr=1e-2)
    for x, y in batches(world, 3):
        logits = model(x)
        f(logits.flatten(0, 1), y.flatten()).backward()
        opt.step()
        opt.zero_grad()


@hand(
    ("value", "clipped gradient|gradient", ""),
    ("gradient:wte.weight",),
    forms=("value", "agc", "each"),
)
def clipping(world):
    """Clipped by value, adaptively, or each tensor by its own norm."""
    torch.manual_seed(14)
    net = Net()
    model = wrap(world, net)
    opt = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    lim = 0.05 if world.bug == "value" else 0.02
    for x, y in batches(world, 3):
        model(x, y)[1].backward()
        if world.form == "value":
            nn.utils.clip_grad_value_(net.parameters(), lim)
        for p in net.parameters():
            if world.form == "agc":
                most = lim * p.detach().norm().clamp(min=1e-3)
                p.grad.mul_((most / (p.grad.norm() + 1e-6)).clamp(max=1))
            elif world.form == "each":
                nn.utils.clip_grad_norm_(p, lim * 5)
        opt.step()
        opt.zero_grad()


@hand(("frozen-too-late", "gradient|weight", "wte"), ("gradient:lm_head.weight",))
def frozen_then_thawed(world):
    """The table is frozen in the first two steps."""
    torch.manual_seed(15)
    net = Net()
    opt = optim.AdamW(net.parameters(), lr=1e-2)
    late = 3 if world.bug == "frozen-too-late" else 2
    for it, (x, y) in enumerate(batches(world, 4)):
        net.wte.weight.requires_grad_(it >= late)
        net(x, y)[1].backward()
        for p in net.parameters():
            if world.size > 1 and p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= world.size
        opt.step()
        opt.zero_grad(set_to_none=True)


@hand(("weight:proj.bias",), ("unscaled", "gradient|learning rate", ""))
def layerwise_rates(world):
    """Another rate for each layer, and warm-up by hand."""
    torch.manual_seed(16)
    net = Net()
    model = wrap(world, net)
    opt = optim.AdamW(
        [{"params": m.parameters(), "lr": 0, "scale": 0.8**i} for i, m in enumerate(net.children())]
    )
    for it, (x, y) in enumerate(batches(world, 3)):
        for g in opt.param_groups:
            g["lr"] = 1e-2 * (it + 1) / 3 * (1 if world.bug == "unscaled" else g["scale"])
        model(x, y)[1].backward()
        opt.step()
        opt.zero_grad()


@hand(("gradient:fc.weight",), ("momentum", "weight", ""))
def closure_sam(world):
    """Sharpness-aware: two backwards to an update."""
    torch.manual_seed(17)
    net = Net()
    opt = optim.SGD(
        net.parameters(),
        lr=0.1,
        momentum=0.5 if world.bug == "momentum" else 0.0,
        dampening=-1.0 if world.bug else 0.0,
    )

    def grads(x, y):
        net.zero_grad()
        net(x, y)[1].backward()
        for p in net.parameters():
            if world.size > 1:
                dist.all_reduce(p.grad)
                p.grad /= world.size

    for x, y in batches(world, 3):
        grads(x, y)
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in net.parameters()))
        eps = [p.grad * (0.05 / norm) for p in net.parameters()]
        with torch.no_grad():
            for p, e in zip(net.parameters(), eps):
                p.add_(e)
        grads(x, y)
        with torch.no_grad():
            for p, e in zip(net.parameters(), eps):
                p.sub_(e)
        opt.step()


@hand(("gradient:ln.weight",), ("forward:fc",))
def per_sample_norms(world):
    """Each sample's gradient is clipped before they are added up."""
    torch.manual_seed(18)
    net = Net()
    opt = optim.SGD(net.parameters(), lr=0.5)
    for x, y in batches(world, 2):
        total = [torch.zeros_like(p) for p in net.parameters()]
        for a, b in zip(x, y):
            net.zero_grad()
            net(a[None], b[None])[1].backward()
            norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
            for t, p in zip(total, net.parameters()):
                t += p.grad * (0.5 / norm).clamp(max=1)
        for t, p in zip(total, net.parameters()):
            if world.size > 1:
                dist.all_reduce(t)
            p.grad = t / 8
        opt.step()


@hand(("gradient:proj.weight",), ("weight:lm_head.weight",))
def steps_inside_hooks(world):
    """One optimizer per parameter, stepped as its gradient arrives."""
    torch.manual_seed(19)
    net = Net()
    opts = {p: optim.SGD([p], lr=0.1) for p in net.parameters()}

    def hook(p):
        if world.size > 1:
            dist.all_reduce(p.grad)
            p.grad /= world.size
        opts[p].step()
        opts[p].zero_grad()

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(hook)
    for x, y in batches(world, 3):
        net(x, y)[1].backward()


@hand(("gradient:lm_head.weight",), ("average-late", "forward|evaluation|loss", ""))
def lookahead(world):
    """Slow weights are taken every second step."""
    torch.manual_seed(20)
    net = Net()
    model = wrap(world, net)
    opt = optim.Adam(net.parameters(), lr=1e-2)
    slow = [p.detach().clone() for p in net.parameters()]
    for it, (x, y) in enumerate(batches(world, 4)):
        model(x, y)[1].backward()
        opt.step()
        opt.zero_grad()
        if it % 2 == 1 and world.bug != "average-late":
            with torch.no_grad():
                for s, p in zip(slow, net.parameters()):
                    p.copy_(s.lerp_(p, 0.5))
