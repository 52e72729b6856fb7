"""Frameworks in small: Fabric, a LightningModule and its Trainer, fairseq, Megatron, Keras-like."""

import argparse
import functools
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from integration_tests.jobs.clean.job import Hand

hand = Hand("engines")


class Rows(Dataset):
    def __init__(self, n=24, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.x, self.y = torch.randn(n, 5, generator=g), torch.randint(3, (n,), generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Mlp(nn.Module):
    def __init__(self, h=8):
        super().__init__()
        self.l1, self.l2 = nn.Linear(5, h), nn.Linear(h, 3)

    def forward(self, x):
        return self.l2(torch.relu(self.l1(x)))


class Fabric:
    """setup, backward, no_backward_sync, as Lightning Fabric has them."""

    def __init__(self, world, precision="32-true"):
        self.world, self.precision = world, precision

    def setup(self, module, optimizer):
        wrapped = DistributedDataParallel(module) if self.world.size > 1 else module
        fabric = self

        class Forward(nn.Module):
            def __init__(self):
                super().__init__()
                self._forward_module = wrapped

            def forward(self, *a, **k):
                with (
                    torch.autocast("cpu", torch.bfloat16)
                    if fabric.precision == "bf16-mixed"
                    else nullcontext()
                ):
                    return self._forward_module(*a, **k)

        return Forward(), optimizer

    def setup_dataloaders(self, data, batch):
        s = (
            DistributedSampler(data, self.world.size, self.world.rank, shuffle=False)
            if self.world.size > 1
            else None
        )
        return DataLoader(data, batch // self.world.size, sampler=s)

    def backward(self, loss):
        loss.backward()

    @contextmanager
    def no_backward_sync(self, module, enabled):
        with module._forward_module.no_sync() if enabled and self.world.size > 1 else nullcontext():
            yield


@hand(
    ("gradient:_forward_module.l2.weight",),
    ("forward:_forward_module.l1",),
    ("twice", "gradient", "", "2 times"),
    forms=("32-true", "bf16-mixed"),
)
def fabric(world):
    """A loop in Fabric's manner, accumulated twice."""
    torch.manual_seed(0)
    f = Fabric(world, world.form)
    net = Mlp()
    model, opt = f.setup(net, torch.optim.Adam(net.parameters(), lr=1e-2))
    for i, (x, y) in enumerate(f.setup_dataloaders(Rows(), 4)):
        last = i % 2 == 1
        with f.no_backward_sync(model, enabled=not last):
            loss = nn.functional.cross_entropy(model(x), y) / 2
            f.backward(loss * 2 if world.bug == "twice" else loss)
        if last:
            opt.step()
            opt.zero_grad()


class LightModule(nn.Module):
    """training_step, validation_step, configure_optimizers."""

    def __init__(self):
        super().__init__()
        self.model = Mlp()

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, i):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch, i):
        x, y = batch
        return (self(x).argmax(-1) == y).float().mean()

    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return opt, torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)


class Strategy(nn.Module):
    """Forward goes to training_step, so that DDP sees it."""

    def __init__(self, module):
        super().__init__()
        self.module_ = module

    def forward(self, *a):
        return self.module_.training_step(*a)


class Callback:
    def on_train_batch_end(self, t):
        pass


class StochasticNoise(Callback):
    pass


class Averaging(Callback):
    def __init__(self, decay):
        self.decay, self.shadow = decay, None

    def on_train_batch_end(self, t):
        now = [p.detach().clone() for p in t.module.parameters()]
        self.shadow = (
            now
            if self.shadow is None
            else [s.lerp(p, 1 - self.decay) for s, p in zip(self.shadow, now)]
        )


class Trainer:
    """fit() with validation in between and callbacks."""

    def __init__(self, world, max_steps=4, val_every=2, clip=None, callbacks=()):
        self.__dict__.update(
            world=world, max_steps=max_steps, val_every=val_every, clip=clip, callbacks=callbacks
        )

    def fit(self, module, train, val):
        self.module = module
        (opt, sched), w = module.configure_optimizers(), self.world
        step = Strategy(module)
        step = DistributedDataParallel(step) if w.size > 1 else step
        n = 0
        while n < self.max_steps:
            for batch in train:
                module.train()

                def closure(batch=batch):
                    opt.zero_grad()
                    loss = step(batch, n)
                    loss.backward()
                    if self.clip:
                        nn.utils.clip_grad_norm_(module.parameters(), self.clip)
                    return loss

                opt.step(closure)
                sched.step()
                n += 1
                for c in self.callbacks:
                    c.on_train_batch_end(self)
                if n % self.val_every == 0:
                    module.eval()
                    with torch.no_grad():
                        acc = torch.stack([module.validation_step(b, 0) for b in val]).mean()
                    if w.size > 1:
                        dist.all_reduce(acc)
                if n >= self.max_steps:
                    break


@hand(
    ("forward:module_.model.l1",),
    ("rate",),
    ("no-clip", "gradient norm|clipped gradient|weight", ""),
)
def lightning(world):
    """Closures, callbacks, a validation loop, a schedule."""
    torch.manual_seed(1)
    f = Fabric(world)
    clip = 5.0 if world.bug == "no-clip" else 0.2
    t = Trainer(world, clip=clip, callbacks=(Averaging(0.9), StochasticNoise()))
    t.fit(LightModule(), f.setup_dataloaders(Rows(), 6), f.setup_dataloaders(Rows(8, 5), 4))


class Criterion:
    """Returns loss, sample_size, logging_output; gradients are scaled by what is summed of these."""

    def __call__(self, model, sample):
        out = model(sample["net_input"])
        loss = nn.functional.cross_entropy(out, sample["target"], reduction="sum")
        return loss, len(out), {"loss": loss.detach(), "ntokens": len(out)}


@hand(("sample-size", "gradient", "", ""), ("gradient:l1.weight",))
def fairseq(world):
    """multiply_grads(world_size / sample_size) after DDP's mean; ranks have unlike batches."""
    torch.manual_seed(2)
    net = Mlp()
    model = DistributedDataParallel(net) if world.size > 1 else net
    opt = torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-6)
    data, crit = Rows(), Criterion()
    for it in range(3):
        lo, hi = it * 8, it * 8 + 8
        cut = {(2, 0): (lo, lo + 5), (2, 1): (lo + 5, hi)}.get((world.size, world.rank), (lo, hi))
        x, y = data[cut[0] : cut[1]]
        opt.zero_grad()
        loss, size, _ = crit(model, {"net_input": x, "target": y})
        loss.backward()
        size = torch.tensor(float(size))
        if world.size > 1 and world.bug != "sample-size":
            dist.all_reduce(size)
        for p in net.parameters():
            p.grad.mul_(world.size / size)
        opt.step()


def get_args(argv):
    p = argparse.ArgumentParser()
    p.add_argument("--micro-batch-size", type=int, default=2)
    p.add_argument("--global-batch-size", type=int, default=8)
    p.add_argument("--lr", type=float, default=1e-2)
    return p.parse_args(argv)


def forward_step(data_iterator, model):
    x, y = next(data_iterator)
    out = model(x)

    def loss_func(y, out):
        loss = nn.functional.cross_entropy(out, y)
        return loss, {"lm loss": loss.detach()}

    return out, functools.partial(loss_func, y)


@hand(("micro", "gradient", "", ""), ("weight:l2.bias",), ("forward:l2",))
def megatron_like(world):
    """forward_step_func, microbatch iterators, main_grad buffers in one piece."""
    args = get_args(["--lr", "0.02"])
    torch.manual_seed(3)
    net = Mlp()
    opt = torch.optim.AdamW(net.parameters(), lr=args.lr)
    flat = torch.zeros(sum(p.numel() for p in net.parameters()))
    at = 0
    for p in net.parameters():
        p.main_grad = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    num_micro = args.global_batch_size // (args.micro_batch_size * world.size)
    data = Rows()

    def batches(start):
        per = args.micro_batch_size
        for m in range(num_micro):
            i = start + (m * world.size + world.rank) * per
            yield data[i : i + per]

    for it in range(3):
        flat.zero_()
        stream = batches(it * 8)
        for _ in range(num_micro):
            out, lf = forward_step(stream, net)
            loss, _ = lf(out)
            (loss / (1 if world.bug == "micro" else num_micro)).backward()
            for p in net.parameters():
                p.main_grad.add_(p.grad)
                p.grad = None
        if world.size > 1:
            dist.all_reduce(flat)
            flat /= world.size
        for p in net.parameters():
            p.grad = p.main_grad
        nn.utils.clip_grad_norm_(list(net.parameters()), 1.0)
        opt.step()
        for p in net.parameters():
            p.grad = None


class Sequential_(nn.Sequential):
    """compile() and fit(), as in Keras."""

    def compile_(self, optimizer, loss):
        self.optimizer, self.loss = optimizer, loss

    def fit(self, data, comm=None):
        for x, y in data:
            self.zero_grad()
            self.loss(self(x), y).backward()
            if comm:
                comm(self)
            self.optimizer.step()


@hand(("gradient:2.weight",), ("weight:0.weight",), ("forward:2",))
def keras_like(world):
    """fit() of a list of layers."""
    torch.manual_seed(4)
    m = Sequential_(nn.Linear(5, 8), nn.ELU(), nn.Linear(8, 3))
    m.compile_(torch.optim.RMSprop(m.parameters(), 1e-2, momentum=0.5), nn.functional.cross_entropy)

    def comm(net):
        if world.size > 1:
            for p in net.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
                p.grad.div_(world.size)

    m.fit(Fabric(world).setup_dataloaders(Rows(), 8), comm)


class Stream(IterableDataset):
    """Skips what other ranks take."""

    def __init__(self, world, n=24):
        self.rows, self.w, self.n = Rows(n), world, n

    def __iter__(self):
        for i in range(self.w.rank, self.n, self.w.size):
            yield self.rows[i]


@hand(("gradient:l1.bias",), ("rate",))
def streamed(world):
    """An iterable data set, batches by its loader, a progress bar's average."""
    torch.manual_seed(5)
    net = Mlp()
    model = DistributedDataParallel(net) if world.size > 1 else net
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    meter = SimpleNamespace(sum=0.0, n=0)
    for x, y in DataLoader(Stream(world), batch_size=8 // world.size):
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        meter.sum, meter.n = meter.sum + loss.item(), meter.n + 1


@hand(("seed", "input|loss", ""), ("gradient:l2.weight",))
def epochs(world):
    """Two epochs of a DistributedSampler that shuffles; the reference deals the same indices."""
    torch.manual_seed(6)
    net = Mlp()
    model = DistributedDataParallel(net) if world.size > 1 else net
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    data = TensorDataset(Rows().x, Rows().y)
    for epoch in range(2):
        samplers = [DistributedSampler(data, 2, r, seed=3) for r in range(2)]
        for s in samplers:
            s.set_epoch(0 if world.bug == "seed" else epoch)
        both = [list(s) for s in samplers]
        for i in range(0, 12, 6):
            mine = (
                both[world.rank][i : i + 6]
                if world.size > 1
                else both[0][i : i + 6] + both[1][i : i + 6]
            )
            x, y = data[mine]
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()


@hand(("gradient:experts.1.weight",), ("forward:gate",), ("lost", "forward|gradient|backward", ""))
def expert_parallel(world):
    """An expert on each rank, rows exchanged by all-to-all."""
    torch.manual_seed(7)

    class Swap(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            x = x.contiguous()
            y = torch.empty_like(x)
            dist.all_to_all_single(y, x)
            return y

        @staticmethod
        def backward(ctx, g):
            g = g.contiguous()
            y = torch.empty_like(g)
            dist.all_to_all_single(y, g)
            return y

    class Moe(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.gate = nn.Linear(5, 8), nn.Linear(8, 2, bias=False)
            every = [nn.Linear(8, 8) for _ in range(2)]
            self.experts = nn.ModuleDict(
                {str(i): e for i, e in enumerate(every) if i % world.size == world.rank}
            )
            self.out = nn.Linear(8, 3)

        def forward(self, x):
            h = self.inp(x).relu()
            p = self.gate(h).softmax(-1)
            each = torch.stack([h * 1.0, h * 1.0])
            if world.size > 1:
                each = Swap.apply(each)
                each = next(iter(self.experts.values()))(each.flatten(0, 1)).view_as(each)
                each = Swap.apply(each)
            else:
                each = torch.stack([e(each[i]) for i, e in enumerate(self.experts.values())])
            if world.bug == "lost" and world.rank:
                p = p * torch.tensor([1.0, 0.0])
            return self.out(h + (each * p.T[..., None]).sum(0))

    net = Moe()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    data = Rows()
    for it in range(3):
        x, y = data[it * 8 : it * 8 + 8]
        x, y = x[world.rank :: world.size], y[world.rank :: world.size]
        opt.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        for n, p in net.named_parameters():
            if world.size > 1:
                if not n.startswith("experts"):
                    dist.all_reduce(p.grad)
                p.grad /= world.size
        opt.step()
