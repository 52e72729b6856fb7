"""Pictures and sound: timm-like nets, detection, generative models, CTC; a small engine of hooks."""

import math
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP

from integration_tests.jobs.clean.job import Hand

hand = Hand("vision and audio")


def is_dist():
    return dist.is_initialized() and dist.get_world_size() > 1


class DistSampler:
    """Every n-th index, as samplers deal them."""

    def __init__(self, n, world):
        self.n, self.w = n, world

    def __iter__(self):
        return iter(range(self.w.rank, self.n, self.w.size))


def deal(world, *tensors):
    idx = list(DistSampler(len(tensors[0]), world))
    return [t[idx] for t in tensors]


class LayerScale(nn.Module):
    def __init__(self, dim, init=0.1):
        super().__init__()
        self.gamma = nn.Parameter(init * torch.ones(dim))

    def forward(self, x):
        return x * self.gamma


class ViTBlock(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(
            OrderedDict(fc1=nn.Linear(dim, 2 * dim), act=nn.GELU(), fc2=nn.Linear(2 * dim, dim))
        )
        self.ls1, self.ls2, self.heads = LayerScale(dim), LayerScale(dim), heads

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = (
            self.qkv(self.norm1(x))
            .reshape(B, N, 3, self.heads, C // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C)
        x = x + self.ls1(self.proj(a))
        return x + self.ls2(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    def __init__(self, dim=8, depth=2, classes=4):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, 5, dim) * 0.02)
        self.blocks = nn.Sequential(*[ViTBlock(dim) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


@hand(
    ("forward:blocks.1.ls2",),
    ("gradient:blocks.0.qkv.weight",),
    ("smoothing", "loss", ""),
    forms=("smooth", "mixup", "bce"),
)
def vit(world):
    """timm's training script: label smoothing, mixup or binary targets."""
    torch.manual_seed(0)
    model = ViT()
    runner = NativeDDP(model) if is_dist() else model
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    g = torch.Generator().manual_seed(0)
    for _ in range(2):
        x, y = torch.randn(8, 3, 8, 8, generator=g), torch.randint(4, (8,), generator=g)
        t = F.one_hot(y, 4).float()
        if world.form == "mixup":
            lam = 0.3 + 0.4 * torch.rand((), generator=g)
            x, t = lam * x + (1 - lam) * x.flip(0), lam * t + (1 - lam) * t.flip(0)
        x, t = deal(world, x, t)
        s = 0.3 if world.bug == "smoothing" else 0.1
        out = runner(x)
        if world.form == "bce":
            loss = F.binary_cross_entropy_with_logits(out, t * (1 - s))
        else:
            loss = -(out.log_softmax(-1) * (t * (1 - s) + s / 4)).sum(-1).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()


@hand(("forward:stages.1",), ("gradient:stem.weight",))
def convnext(world):
    """Depth-wise convolutions and channel norms."""
    torch.manual_seed(1)

    class Block(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.dw, self.norm = nn.Conv2d(d, d, 3, padding=1, groups=d), nn.GroupNorm(1, d)
            self.pw1, self.pw2 = nn.Conv2d(d, 2 * d, 1), nn.Conv2d(2 * d, d, 1)

        def forward(self, x):
            return x + self.pw2(F.gelu(self.pw1(self.norm(self.dw(x)))))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 6, 2, 2)
            self.stages = nn.ModuleList([Block(6), Block(6)])
            self.head = nn.Linear(6, 4)

        def forward(self, x):
            x = self.stem(x)
            for s in self.stages:
                x = s(x)
            return self.head(x.mean((-2, -1)))

    model = Net()
    runner = NativeDDP(model) if is_dist() else model
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    g = torch.Generator().manual_seed(1)
    for _ in range(3):
        x, y = deal(
            world, torch.randn(8, 3, 8, 8, generator=g), torch.randint(4, (8,), generator=g)
        )
        F.cross_entropy(runner(x), y).backward()
        opt.step()
        opt.zero_grad()


@hand(("gradient:head.weight",), ("weight:head.weight",))
def batch_norm_frozen(world):
    """Batch norms in eval mode, as detection and fine-tuning have them."""
    torch.manual_seed(2)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn, self.head = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Linear(6, 4)
            self.bn.running_mean.uniform_(-0.1, 0.1)

        def train(self, mode=True):
            super().train(mode)
            self.bn.eval()
            return self

        def forward(self, x):
            return self.head(self.bn(self.conv(x)).relu().mean((2, 3)))

    model = Net().train()
    runner = NativeDDP(model) if is_dist() else model
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(2)
    for _ in range(3):
        x, y = deal(
            world, torch.randn(8, 3, 8, 8, generator=g), torch.randint(4, (8,), generator=g)
        )
        F.cross_entropy(runner(x), y).backward()
        opt.step()
        opt.zero_grad()


@hand(("gradient:dec.weight",), ("class-weights", "loss|gradient", ""))
def segmentation(world):
    """A small U-Net; pixels are weighted, some are void."""
    torch.manual_seed(3)

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc, self.mid = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
            self.dec = nn.Conv2d(12, 4, 3, padding=1)

        def forward(self, x):
            a = self.enc(x).relu()
            b = F.interpolate(self.mid(F.max_pool2d(a, 2)).relu(), scale_factor=2.0)
            return self.dec(torch.cat([a, b], 1))

    model = UNet()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(3)
    w = torch.tensor([1.0, 2.0, 0.5, 1.5])
    for _ in range(3):
        x, y = torch.randn(4, 3, 8, 8, generator=g), torch.randint(-1, 4, (4, 8, 8), generator=g)
        x, y = deal(world, x, y)
        num = F.cross_entropy(model(x), y, weight=w, ignore_index=-1, reduction="sum")
        den = (w[y.clamp(min=0)] * (y >= 0)).sum()
        if is_dist() and world.bug != "class-weights":
            dist.all_reduce(den)
        (num / den).backward()
        for p in model.parameters():
            if is_dist():
                dist.all_reduce(p.grad)
        opt.step()
        opt.zero_grad()


@hand(("num-boxes", "loss|gradient", ""), ("forward:cls",), ("gradient:box.weight",))
def detection(world):
    """Each picture has another number of boxes; losses are divided by the mean of all ranks'."""
    torch.manual_seed(4)

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.cls, self.box = nn.Conv2d(3, 6, 4, 4), nn.Linear(6, 3), nn.Linear(6, 4)

        def forward(self, x):
            h = self.body(x).flatten(2).transpose(1, 2).relu()
            return {"pred_logits": self.cls(h), "pred_boxes": self.box(h).sigmoid()}

    model = Head()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(4)
    for _ in range(3):
        x = torch.randn(6, 3, 8, 8, generator=g)
        targets = [
            {"labels": torch.randint(2, (n,), generator=g), "boxes": torch.rand(n, 4, generator=g)}
            for n in (1, 3, 2, 4, 1, 2)
        ]
        idx = list(DistSampler(6, world))
        out = model(x[idx])
        n = torch.tensor(float(sum(len(targets[i]["labels"]) for i in idx)))
        if is_dist() and world.bug != "num-boxes":
            dist.all_reduce(n)
        n = n / world.size
        loss = 0
        for j, i in enumerate(idx):
            k = len(targets[i]["labels"])
            t = torch.full((4,), 2)
            t[:k] = targets[i]["labels"]
            loss = loss + F.cross_entropy(out["pred_logits"][j], t, reduction="sum") / n
            loss = loss + (out["pred_boxes"][j, :k] - targets[i]["boxes"]).abs().sum() / n
        (loss / (world.size if is_dist() else 1)).backward()
        if is_dist():
            for p in model.parameters():
                dist.all_reduce(p.grad)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
        opt.zero_grad()


@dataclass
class Schedule:
    """Noise by time."""

    steps: int = 10

    def alpha(self, t):
        return torch.cos(t.float() / self.steps * math.pi / 2) ** 2


@hand(
    ("times", "forward|input|loss", ""),
    ("gradient:temb.weight",),
    ("forward:out",),
    forms=("eps", "v", "flow"),
)
def diffusion(world):
    """Noise, times and pictures come from one generator; noise or velocity is told."""
    torch.manual_seed(5)

    class Unet(nn.Module):
        def __init__(self):
            super().__init__()
            self.temb, self.inp, self.out = (
                nn.Embedding(10, 6),
                nn.Conv2d(1, 6, 3, padding=1),
                nn.Conv2d(6, 1, 3, padding=1),
            )

        def forward(self, sample, timestep):
            return self.out(F.silu(self.inp(sample) + self.temb(timestep)[:, :, None, None]))

    model, sch = Unet(), Schedule()
    runner = NativeDDP(model) if is_dist() else model
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    g = torch.Generator().manual_seed(5)
    for _ in range(3):
        x, e = torch.randn(8, 1, 6, 6, generator=g), torch.randn(8, 1, 6, 6, generator=g)
        t = torch.randint(10, (8,), generator=g)
        x, e, t = deal(world, x, e, t)
        if world.bug == "times" and world.rank:
            t = t.flip(0)
        a = sch.alpha(t)[:, None, None, None]
        if world.form == "flow":
            noisy, want = a * x + (1 - a) * e, x - e
        else:
            noisy = a.sqrt() * x + (1 - a).sqrt() * e
            want = e if world.form == "eps" else a.sqrt() * e - (1 - a).sqrt() * x
        F.mse_loss(runner(noisy, t), want).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()


@hand(("forward:2",), ("real-only", "loss|gradient|backward", ""), forms=("hinge", "bce"))
def gan(world):
    """Generator and discriminator in one module, called by a flag."""
    torch.manual_seed(6)

    class Gan(nn.Module):
        def __init__(self):
            super().__init__()
            self.G = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(0.2), nn.Linear(8, 5))
            self.D = nn.Sequential(nn.Linear(5, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    m = Gan()
    og = torch.optim.Adam(m.G.parameters(), lr=1e-3, betas=(0.5, 0.9))
    od = torch.optim.Adam(m.D.parameters(), lr=1e-3, betas=(0.5, 0.9))
    hinge = world.form == "hinge"
    up = lambda v: (1 - v).relu().mean() if hinge else F.softplus(-v).mean()
    down = lambda v: (1 + v).relu().mean() if hinge else F.softplus(v).mean()

    def reduce(net):
        for p in net.parameters():
            if is_dist():
                dist.all_reduce(p.grad)
                p.grad /= world.size

    g = torch.Generator().manual_seed(6)
    for _ in range(2):
        real, z = deal(world, torch.randn(8, 5, generator=g), torch.randn(8, 3, generator=g))
        fake = m.G(z)
        od.zero_grad()
        loss = up(m.D(real)) + (
            0 if world.bug == "real-only" and world.rank else down(m.D(fake.detach()))
        )
        loss.backward()
        reduce(m.D)
        od.step()
        og.zero_grad()
        v = m.D(m.G(z))
        (-v.mean() if hinge else up(v)).backward()
        reduce(m.G)
        og.step()


@hand(("momentum", "loss|forward|evaluation", ""), ("gradient:q.weight",))
def moco(world):
    """A queue of keys, filled by all ranks in the same order; a key encoder by momentum."""
    torch.manual_seed(7)

    class Moco(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(6, 4), nn.Linear(6, 4)
            self.k.load_state_dict(self.q.state_dict())
            self.k.requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(8, 4), dim=1))

        def forward(self, a, b):
            m = 0.5 if world.bug == "momentum" else 0.9
            with torch.no_grad():
                for x, y in zip(self.k.parameters(), self.q.parameters()):
                    x.mul_(m).add_(y, alpha=1 - m)
                k = F.normalize(self.k(b), dim=1)
            q = F.normalize(self.q(a), dim=1)
            pos, neg = (q * k).sum(1, keepdim=True), q @ self.queue.T.clone()
            return torch.cat([pos, neg], 1) / 0.2, k

    model = Moco()
    opt = torch.optim.SGD(model.q.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(7)
    for _ in range(3):
        a, b = torch.randn(4, 6, generator=g), torch.randn(4, 6, generator=g)
        a, b = (t.chunk(world.size)[world.rank] for t in (a, b))
        logits, k = model(a, b)
        F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long)).backward()
        for p in model.q.parameters():
            if is_dist():
                dist.all_reduce(p.grad)
                p.grad /= world.size
        if is_dist():
            ks = [torch.empty_like(k) for _ in range(world.size)]
            dist.all_gather(ks, k)
            k = torch.cat(ks)
        model.queue = torch.cat([model.queue[4:], k])
        opt.step()
        opt.zero_grad()


@hand(("mask-ratio", "forward|loss|input", ""), ("gradient:dec.weight",))
def masked_autoencoder(world):
    """Some patches are seen, the others are made up; which ones is told by the sample."""
    torch.manual_seed(8)

    class Mae(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc, self.mix, self.dec = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 5)
            self.mask_token = nn.Parameter(torch.zeros(1, 1, 8))

        def forward(self, x, keep):
            see = self.mix(self.enc(x.gather(1, keep[..., None].expand(-1, -1, 5))).relu())
            h = self.mask_token.expand(len(x), x.shape[1], 8).scatter(
                1, keep[..., None].expand(-1, -1, 8), see
            )
            return self.dec(h + h.mean(1, keepdim=True))

    model = Mae()
    runner = NativeDDP(model) if is_dist() else model
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(8)
    for _ in range(3):
        x = torch.randn(8, 6, 5, generator=g)
        order = torch.rand(8, 6, generator=g).argsort(1)
        x, order = deal(world, x, order)
        keep = order[:, : 2 if world.bug == "mask-ratio" and world.rank else 3]
        loss = (runner(x, keep) - x).square().mean(-1)
        loss.gather(1, order[:, 3:]).mean().backward()
        opt.step()
        opt.zero_grad()


@hand(("lengths", "loss", ""), ("gradient:fc.weight",), ("forward:conv",))
def ctc(world):
    """Speech: spectrograms [batch, mel, time] of one length, texts of others, a CTC loss."""
    torch.manual_seed(9)

    class Acoustic(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.rnn, self.fc = (
                nn.Conv1d(4, 8, 3, padding=1),
                nn.GRU(8, 8, batch_first=True),
                nn.Linear(8, 6),
            )

        def forward(self, mel):
            h, _ = self.rnn(self.conv(mel).relu().transpose(1, 2))
            return self.fc(h).log_softmax(-1)

    model = Acoustic()
    runner = NativeDDP(model) if is_dist() else model
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(9)
    for _ in range(3):
        x, y = torch.randn(8, 4, 12, generator=g), torch.randint(1, 6, (8, 4), generator=g)
        il, tl = torch.randint(9, 13, (8,), generator=g), torch.randint(2, 5, (8,), generator=g)
        x, y, il, tl = deal(world, x, y, il, tl)
        if world.bug == "lengths" and world.rank:
            il = torch.full_like(il, 8)
        each = F.ctc_loss(runner(x).transpose(0, 1), y, il, tl, reduction="none")
        (each / tl).mean().backward()
        opt.step()
        opt.zero_grad()


@hand(("gradient:project.weight",), ("distractors", "loss|gradient", ""))
def wav2vec(world):
    """Frames are masked and told apart from distractors of the same sentence."""
    torch.manual_seed(10)

    class W2V(nn.Module):
        def __init__(self):
            super().__init__()
            self.feat, self.ctx, self.project = (
                nn.Conv1d(1, 6, 4, 2),
                nn.GRU(6, 6, batch_first=True),
                nn.Linear(6, 6),
            )
            self.hole = nn.Parameter(torch.randn(6))

        def forward(self, wave, masked):
            z = self.feat(wave[:, None]).transpose(1, 2)
            h, _ = self.ctx(torch.where(masked[..., None], self.hole, z))
            return self.project(h), z

    model = W2V()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(10)
    for _ in range(3):
        wave, mask = torch.randn(6, 20, generator=g), torch.rand(6, 9, generator=g) < 0.4
        mask[:, 0] = True
        n = mask.sum()
        wave, mask = deal(world, wave, mask)
        c, z = model(wave, mask)
        sim = F.cosine_similarity(c[:, :, None], z[:, None], dim=-1) / (
            0.3 if world.bug == "distractors" and world.rank else 0.1
        )
        want = torch.arange(9).expand(len(wave), 9)
        each = F.cross_entropy(sim.transpose(1, 2), want, reduction="none")
        ((each * mask).sum() / n).backward()
        if is_dist():
            for p in model.parameters():
                dist.all_reduce(p.grad)
        opt.step()
        opt.zero_grad()


class Hook:
    def after_iter(self, runner):
        pass


class OptimizerHook(Hook):
    def __init__(self, clip=None):
        self.clip = clip

    def after_iter(self, runner):
        runner.optimizer.zero_grad()
        runner.outputs["loss"].backward()
        if self.clip:
            nn.utils.clip_grad_norm_(runner.model.parameters(), self.clip)
        runner.optimizer.step()


class LoggerHook(Hook):
    def after_iter(self, runner):
        v = runner.outputs["loss"].detach().clone()
        if is_dist():
            dist.all_reduce(v)
        runner.log.append(float(v) / dist.get_world_size() if is_dist() else float(v))


class Runner:
    """mmcv's loop: a registry, hooks, train_step of the model."""

    def __init__(self, model, optimizer, hooks):
        self.model, self.optimizer, self.hooks, self.log = model, optimizer, hooks, []

    def run(self, loader):
        for batch in loader:
            self.outputs = self.model(**batch)
            for h in self.hooks:
                h.after_iter(self)


REGISTRY = {}


def register(cls):
    REGISTRY[cls.__name__] = cls
    return cls


@register
class Classifier(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.backbone, self.neck, self.head = (
            nn.Conv2d(3, width, 3),
            nn.AdaptiveAvgPool2d(1),
            nn.Linear(width, classes),
        )

    def forward(self, img, gt_label):
        score = self.head(self.neck(self.backbone(img).relu()).flatten(1))
        return {"loss": F.cross_entropy(score, gt_label), "num_samples": len(img)}


@hand(("forward:head",), ("gradient:backbone.weight",), ("rate",))
def runner_with_hooks(world):
    """Built from a dict, driven by hooks."""
    cfg = {"model": {"type": "Classifier", "width": 6, "classes": 4}, "lr": 0.05, "clip": 0.5}
    torch.manual_seed(11)
    args = dict(cfg["model"])
    model = REGISTRY[args.pop("type")](**args)
    g = torch.Generator().manual_seed(11)

    def loader():
        for _ in range(3):
            x, y = deal(
                world, torch.randn(8, 3, 6, 6, generator=g), torch.randint(4, (8,), generator=g)
            )
            yield {"img": x, "gt_label": y}

    wrapped = NativeDDP(model) if is_dist() else model
    opt = torch.optim.SGD(model.parameters(), lr=cfg["lr"], momentum=0.9)
    Runner(wrapped, opt, [OptimizerHook(cfg["clip"]), LoggerHook()]).run(loader())


@hand(("gradient:layers.2.weight",), ("jitter", "forward|input|loss", ""))
def nerf(world):
    """Rays of one picture, dealt over ranks; positions in sines."""
    torch.manual_seed(12)
    enc = lambda p: torch.cat([f(p * 2**i) for i in range(3) for f in (torch.sin, torch.cos)], -1)

    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(18, 12), nn.ReLU(), nn.Linear(12, 4))

        def forward(self, o, d):
            t = torch.linspace(0.1, 1, 5)
            raw = self.layers(enc(o[:, None] + d[:, None] * t[:, None]))
            a = 1 - (-raw[..., 3].relu() * 0.2).exp()
            w = a * torch.cumprod(torch.cat([torch.ones(len(o), 1), 1 - a + 1e-10], 1), 1)[:, :-1]
            return (w[..., None] * raw[..., :3].sigmoid()).sum(1)

    model = Field()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    g = torch.Generator().manual_seed(12)
    for _ in range(3):
        o, d = torch.randn(16, 3, generator=g), torch.randn(16, 3, generator=g)
        c = torch.rand(16, 3, generator=g)
        o, d, c = deal(world, o, d, c)
        if world.bug == "jitter" and world.rank:
            d = d * 1.01
        F.mse_loss(model(o, d), c).backward()
        if is_dist():
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world.size
        opt.step()
        opt.zero_grad()


@hand(("gradient:fc.weight",), ("margin", "loss|gradient", ""))
def triplets(world):
    """Anchor, positive and negative by one net; a margin most are beyond."""
    torch.manual_seed(13)

    class Emb(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 4)

        def forward(self, a, p, n):
            return tuple(map(self.fc, (a, p, n)))

    model = Emb()
    runner = NativeDDP(model) if is_dist() else model
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(13)
    loss_fn = partial(F.triplet_margin_loss, margin=2.0 if world.bug == "margin" else 1.0)
    for _ in range(3):
        a, p, n = deal(world, *(torch.randn(8, 6, generator=g) for _ in range(3)))
        loss_fn(*runner(a, p, n)).backward()
        opt.step()
        opt.zero_grad()
