"""Jobs put together by chance: a model, a way to deal out and pad, a loss, a wrapper, an optimizer."""

import random
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from integration_tests.jobs.clean.job import DRAWN, Clean, seeded_as

V, D, PAD = 18, 8, 0
AXES = {
    "model": ("attention", "attention", "gru", "conv", "bag", "mlp", "cnn"),
    "lengths": ("all alike", "other", "other"),
    "side": ("right", "left", "both"),
    "mask": ("attention_mask", "padding_mask", "mask", "pad_mask"),
    "deal": ("strided", "chunks", "reversed", "uneven", "by length"),
    "micro": (1, 2, 3, 8),
    "loss": ("mean", "smoothed", "focal", "margin"),
    "wrapper": ("sums", "ddp", "fsdp2", "flat"),
    "optimizer": ("adamw", "sgd", "adagrad", "rmsprop", "nadam", "adamax"),
    "dtype": ("float32", "float32", "float32", "bfloat16", "float64"),
    "clip": (None, 0.3, 1.0),
    "rate": ("constant", "cosine"),
    "again": (False, False, True),
    "evaluates": (False, True),
    "average": (False, True),
    "scaler": (False, False, True),
}
BUGS = ("gradient:{p}", "forward:{m}", "weight:{p}", "rate", "start:{p}", "count", "unsummed")


class Body(nn.Module):
    """Any of the models; `again` computes its middle again in the backward."""

    def __init__(self, kind, again):
        super().__init__()
        self.kind, self.again = kind, again
        if kind in ("mlp", "cnn"):
            self.first = nn.Linear(6, D) if kind == "mlp" else nn.Conv2d(2, D, 3)
        else:
            self.first = nn.Embedding(V, D)
        if kind == "attention":
            self.pos, self.qkv = nn.Embedding(16, D), nn.Linear(D, 3 * D)
        elif kind == "gru":
            self.rnn = nn.GRU(D, D, batch_first=True)
        elif kind == "conv":
            self.conv = nn.Conv1d(D, D, 3)
        self.norm = nn.LayerNorm(D)
        self.ffn = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
        self.head = nn.Linear(D, V)

    def middle(self, x):
        return self.norm(x + self.ffn(x))

    def forward(self, x, **masks):
        mask = None
        for name, m in masks.items():
            mask = (m == 0) if "padding" in name or "pad" in name else m.bool()
        if self.kind == "cnn":
            h = self.first(x).relu().mean((2, 3))
        else:
            h = self.first(x)
        if self.kind == "attention":
            p = (mask.long().cumsum(1) - 1).clamp(min=0)
            h = h + self.pos(p)
            q, k, v = self.qkv(h).chunk(3, -1)
            see = mask[:, None] & torch.ones(x.shape[1], x.shape[1]).tril().bool()
            h = h + (q @ k.mT * 0.3).masked_fill(~see, -1e9).softmax(-1) @ v
        elif self.kind == "gru":
            # Left padding is skipped sample by sample.
            keep = mask[..., None].to(h.dtype)
            order = (~mask).long().argsort(dim=1, stable=True)
            packed = (h * keep).gather(1, order[..., None].expand_as(h))
            out, _ = self.rnn(packed)
            h = h + out.gather(1, order.argsort(1)[..., None].expand_as(h)) * keep
        elif self.kind == "conv":
            keep = mask[:, None].to(h.dtype)
            h = h + self.conv(F.pad(h.mT * keep, (2, 0))).mT
        elif self.kind == "bag":
            keep = mask[..., None].to(h.dtype)
            h = h + (h * keep).sum(1, keepdim=True) / keep.sum(1, keepdim=True)
        h = checkpoint(self.middle, h, use_reentrant=False) if self.again else self.middle(h)
        return self.head(h)


def choose(number):
    dice = random.Random(number)
    chosen = {axis: dice.choice(values) for axis, values in AXES.items()}
    if chosen["dtype"] != "float32":
        chosen["scaler"] = False
    if chosen["wrapper"] == "fsdp2":
        chosen["scaler"] = False
        if chosen["deal"] == "uneven":  # all gather as often
            chosen["deal"] = "strided"
    return chosen


def collate(rows, side):
    L = max(map(len, rows))
    ids, mask = torch.full((len(rows), L), PAD), torch.zeros(len(rows), L, dtype=torch.long)
    for i, r in enumerate(rows):
        off = {"right": 0, "left": L - len(r), "both": (L - len(r)) // 2}[side]
        ids[i, off : off + len(r)], mask[i, off : off + len(r)] = r, 1
    return ids, mask


def dealt(world, how, rows):
    n = len(rows)
    if world.size == 1:
        return list(range(n))
    order = list(range(n))
    if how == "reversed":
        order.reverse()
    if how == "by length":
        order.sort(key=lambda i: (len(rows[i]), i))
    if how == "uneven":
        return order[: n - 3] if world.rank == 0 else order[n - 3 :]
    if how == "chunks":
        return order[world.rank * n // 2 :][: n // 2]
    return order[world.rank :: 2]


def each_loss(kind, logits, y):
    if kind == "smoothed":
        return F.cross_entropy(logits, y, reduction="none", label_smoothing=0.1)
    if kind == "focal":
        ce = F.cross_entropy(logits, y, reduction="none")
        return (1 - (-ce).exp()) ** 2 * ce
    if kind == "margin":
        return F.multi_margin_loss(logits, y, reduction="none")
    return F.cross_entropy(logits, y, reduction="none")


def drawn(world):
    c = choose(int(world.form))
    torch.manual_seed(int(world.form))
    dtype = torch.float64 if c["dtype"] == "float64" else torch.float32
    net = Body(c["model"], c["again"]).to(dtype)
    model, by_mean = net, False
    if world.size > 1 and c["wrapper"] == "ddp" and world.bug != "unsummed":
        model, by_mean = DistributedDataParallel(net), True
    if world.size > 1 and c["wrapper"] == "fsdp2" and world.bug != "unsummed":
        fully_shard(net.ffn)
        fully_shard(net)
        by_mean = True
    p = list(net.parameters())
    opt = {
        "adamw": lambda: torch.optim.AdamW(p, lr=1e-2, eps=1e-4),
        "sgd": lambda: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adagrad": lambda: torch.optim.Adagrad(p, lr=0.05, eps=1e-4),
        "rmsprop": lambda: torch.optim.RMSprop(p, lr=1e-2, eps=1e-4),
        "nadam": lambda: torch.optim.NAdam(p, lr=1e-2, eps=1e-4),
        "adamax": lambda: torch.optim.Adamax(p, lr=1e-2, eps=1e-4),
    }[c["optimizer"]]()
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 4) if c["rate"] == "cosine" else None
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=c["scaler"])
    shadow = [q.detach().clone() for q in p]
    g = torch.Generator().manual_seed(int(world.form))
    is_text = c["model"] not in ("mlp", "cnn")
    for it in range(3):
        n = 8
        lens = (
            torch.randint(2, 8, (n,), generator=g)
            if c["lengths"] == "other"
            else torch.full((n,), 6)
        )
        if is_text:
            rows = [torch.randint(1, V, (int(k) + 1,), generator=g) for k in lens]
        elif c["model"] == "mlp":
            rows = list(torch.randn(n, 6, generator=g, dtype=dtype))
        else:
            rows = list(torch.randn(n, 2, 6, 6, generator=g, dtype=dtype))
        targets = torch.randint(V, (n,), generator=g)
        mine = dealt(world, c["deal"], rows)
        total = (
            sum(len(rows[i]) - 1 for i in (mine if world.bug == "count" else range(n)))
            if is_text
            else len(mine if world.bug == "count" else rows)
        )
        size = n if world.size == 1 else int(c["micro"])
        parts = [mine[i : i + size] for i in range(0, len(mine), size)]
        for k, part in enumerate(parts):
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = k == len(parts) - 1
            elif by_mean:
                net.set_requires_gradient_sync(k == len(parts) - 1)
            with (
                torch.autocast("cpu", torch.bfloat16) if c["dtype"] == "bfloat16" else nullcontext()
            ):
                if is_text:
                    ids, mask = collate([rows[i] for i in part], c["side"])
                    given = 1 - mask if "pad" in c["mask"] else mask
                    logits = model(ids, **{c["mask"]: given})
                    keep = (mask[:, 1:] * mask[:, :-1]).flatten()
                    each = (
                        each_loss(c["loss"], logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
                        * keep
                    )
                else:
                    each = each_loss(
                        c["loss"], model(torch.stack([rows[i] for i in part])), targets[part]
                    )
            loss = each.sum() / total * (world.size if by_mean else 1)
            scaler.scale(loss).backward()
        if world.size > 1 and not by_mean and world.bug != "unsummed":
            if c["wrapper"] == "flat":
                buf = torch.cat([q.grad.flatten() for q in p])
                dist.all_reduce(buf)
                for q, part in zip(p, buf.split([q.numel() for q in p])):
                    q.grad.copy_(part.view_as(q))
            else:
                for q in p:
                    dist.all_reduce(q.grad)
        if c["clip"]:
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(p, c["clip"])
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        if sched:
            sched.step()
        if c["average"] and not by_mean:
            for s, q in zip(shadow, p):
                s.lerp_(q.detach(), 0.1)
        if c["evaluates"]:
            net.eval()
            with torch.no_grad():
                if is_text:
                    ids, mask = collate([r for r in rows[:4]], c["side"])
                    model(ids, **{c["mask"]: 1 - mask if "pad" in c["mask"] else mask})
                else:
                    model(torch.stack(rows[:4]))
            net.train()


_MODULES, _PARAMETERS = (
    ("norm", "ffn.0", "head", "first"),
    ("head.weight", "ffn.2.bias", "first.weight", "norm.weight"),
)


def jobs(count):
    """Return jobs by name."""
    made = {}
    for number in range(count):
        dice = random.Random(-number - 1)
        outside = BUGS[number % len(BUGS)].format(
            p=dice.choice(_PARAMETERS), m=dice.choice(_MODULES)
        )
        bug = {
            "count": ("count", "gradient|loss", ""),
            "unsummed": ("unsummed", "gradient", "", "sum over them is missing"),
        }.get(outside, (outside,))
        name = f"drawn-{number:03}"
        made[name] = Clean(name, "drawn by chance", drawn, (seeded_as(bug),), DRAWN, str(number))
    return made
