"""Layouts: DDP and its options, FSDP1 and 2, tensors, stages, sequences and experts over ranks."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.func import functional_call, grad
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from integration_tests.jobs.clean.job import Hand

hand = Hand("layouts of torch")
V, D = 20, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.w1, self.w2 = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        return x + self.w2(F.silu(self.w1(self.norm(x))))


class Tiny(nn.Module):
    def __init__(self, n=2):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(Block() for _ in range(n))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, x):
        x = self.emb(x)
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x))


def tokens(gen, n=8, length=7):
    t = torch.randint(V, (n, length), generator=gen)
    return t[:, :-1], t[:, 1:]


def ce(y, t):
    return F.cross_entropy(y.flatten(0, -2), t.flatten())


def loop(world, net, model, opt, steps=3, clip=None, after=None, mine=True):
    gen = torch.Generator().manual_seed(3)
    for _ in range(steps):
        x, t = tokens(gen)
        if mine:
            x, t = x[world.rank :: world.size], t[world.rank :: world.size]
        opt.zero_grad()
        ce(model(x), t).backward()
        if after:
            after()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        opt.step()


DDP_FORMS = ("plain", "unused", "static", "view", "buckets", "no-buffers")


@hand(
    ("forward:blocks.1.w1",),
    ("gradient:norm.weight",),
    ("unwrapped", "gradient", "head.weight", "sum over them is missing"),
    forms=DDP_FORMS,
)
def ddp(world):
    """DistributedDataParallel with each of its options."""
    torch.manual_seed(0)
    net = Tiny()
    model = net
    if world.size > 1 and world.bug != "unwrapped":
        more = {
            "plain": {},
            "unused": {"find_unused_parameters": True},
            "static": {"static_graph": True},
            "view": {"gradient_as_bucket_view": True},
            "buckets": {"bucket_cap_mb": 0.0005},
            "no-buffers": {"broadcast_buffers": False},
        }[world.form]
        model = DDP(net, **more)
    loop(world, net, model, torch.optim.AdamW(net.parameters(), lr=1e-2))


@hand(("gradient:blocks.0.w1.weight",), ("local-clip", "gradient norm", ""))
def fsdp2_nested(world):
    """fully_shard of blocks and root, gradients clipped."""
    torch.manual_seed(1)
    net = Tiny()
    if world.size > 1:
        for b in net.blocks:
            fully_shard(b)
        fully_shard(net)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def local():
        if world.bug == "local-clip":
            parts = [
                p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
                for p in net.parameters()
            ]
            norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in parts]))
            nn.utils.clip_grads_with_norm_(list(net.parameters()), 0.3, norm)

    loop(world, net, net, opt, clip=None if world.bug else 0.3, after=local if world.bug else None)


@hand(
    ("weight:head.weight",), ("gradient:emb.weight",), forms=("keep", "mixed", "hsdp", "prefetch")
)
def fsdp2_options(world):
    """reshard_after_forward off, a policy of dtypes that changes none, replicas, prefetching."""
    torch.manual_seed(2)
    net = Tiny(3)
    if world.size > 1:
        more = {
            "keep": {"reshard_after_forward": False},
            "mixed": {"mp_policy": MixedPrecisionPolicy(torch.float32, torch.float32)},
            "hsdp": {
                "mesh": init_device_mesh(
                    "cpu", (world.size, 1), mesh_dim_names=("replica", "shard")
                )
            },
            "prefetch": {},
        }[world.form]
        for b in net.blocks:
            fully_shard(b, **more)
        fully_shard(net, **more)
        if world.form == "prefetch":
            net.blocks[0].set_modules_to_forward_prefetch([net.blocks[1]])
    loop(world, net, net, torch.optim.AdamW(net.parameters(), lr=1e-2), clip=1.0)


@hand(("rate",), ("scaled", "gradient", "", "2 times"), forms=("full", "original", "grad-op"))
def fsdp1(world):
    """FullyShardedDataParallel, the first one."""
    torch.manual_seed(3)
    net = Tiny()
    model = net
    if world.size > 1:
        model = FSDP(
            net,
            device_id=torch.device("cpu"),
            use_orig_params=world.form == "original",
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP if world.form == "grad-op" else None,
        )
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    gen = torch.Generator().manual_seed(3)
    for _ in range(3):
        x, t = tokens(gen)
        opt.zero_grad()
        loss = ce(model(x[world.rank :: world.size]), t[world.rank :: world.size])
        (loss * (world.size if world.bug == "scaled" else 1)).backward()
        opt.step()


@hand(("bias-on-all", "forward", "blocks"), ("gradient:blocks.0.w1.weight",))
def tensor_parallel(world):
    """parallelize_module: columns, then rows."""
    torch.manual_seed(4)
    net = Tiny()
    if world.size > 1:
        mesh = init_device_mesh("cpu", (world.size,))
        for b in net.blocks:
            parallelize_module(b, mesh, {"w1": ColwiseParallel(), "w2": RowwiseParallel()})
        if world.bug == "bias-on-all":
            w2 = net.blocks[1].w2
            w2.register_forward_hook(lambda m, a, y: y + m.bias.full_tensor())
    loop(world, net, net, torch.optim.AdamW(net.parameters(), lr=1e-2), mine=False)


@hand(("gradient:blocks.1.w2.weight",), ("weight:blocks.0.w1.bias",))
def tensor_and_sequence(world):
    """Norms by sequence, vocabulary by columns, the loss over parts of it."""
    torch.manual_seed(5)
    net = Tiny()
    ctx = contextlib.nullcontext
    if world.size > 1:
        mesh = init_device_mesh("cpu", (world.size,))
        plan = {
            "emb": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        }
        for i in range(2):
            plan |= {
                f"blocks.{i}": PrepareModuleInput(
                    input_layouts=(Shard(1),),
                    desired_input_layouts=(Shard(1),),
                    use_local_output=False,
                ),
                f"blocks.{i}.norm": SequenceParallel(),
                f"blocks.{i}.w1": ColwiseParallel(input_layouts=Shard(1)),
                f"blocks.{i}.w2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            }
        parallelize_module(net, mesh, plan)
        ctx = loss_parallel
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    gen = torch.Generator().manual_seed(3)
    for _ in range(2):
        x, t = tokens(gen)
        opt.zero_grad()
        with ctx():
            ce(net(x), t).backward()
        opt.step()


class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g


class HandMade(nn.Module):
    """Megatron's two linear layers by hand, halves of a whole that all ranks draw."""

    def __init__(self, world):
        super().__init__()
        a, b = torch.randn(16, D) * 0.3, torch.randn(D, 16) * 0.3
        sl = torch.arange(16).chunk(world.size)[world.rank]
        self.emb, self.norm = nn.Embedding(V, D), nn.LayerNorm(D)
        self.up, self.down = nn.Parameter(a[sl].clone()), nn.Parameter(b[:, sl].clone())
        self.bias, self.head = nn.Parameter(torch.zeros(D)), nn.Linear(D, V)
        self.world = world

    def forward(self, x):
        h = self.emb(x)
        z = self.norm(h)
        w = self.world
        z = SumBackward.apply(z) if w.size > 1 and w.bug != "no-f" else z
        y = F.gelu(z @ self.up.T) @ self.down.T
        y = SumForward.apply(y) if w.size > 1 else y
        if w.bug == "bias-twice":
            y = y + self.bias
        return self.head(h + y + self.bias)


@hand(
    ("no-f", "backward|gradient", "norm|emb"),
    ("bias-twice", "forward|gradient", ""),
    ("gradient:up",),
)
def megatron_by_hand(world):
    """Conjugate functions f and g."""
    torch.manual_seed(6)
    net = HandMade(world)
    nn.init.normal_(net.bias)
    loop(world, net, net, torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-5), mine=False)


@hand(("last-only", "loss|gradient", ""), ("gradient:m.0.weight",))
def stages_by_hand(world):
    """Two stages that send and receive activations, microbatch by microbatch."""
    torch.manual_seed(7)
    whole = [nn.Embedding(V, D), nn.Sequential(nn.Linear(D, D), nn.Tanh()), nn.Linear(D, V)]
    parts = whole if world.size == 1 else (whole[:1], whole[1:])[world.rank]
    first = 0 if world.rank == 0 else 1
    net = nn.ModuleDict({str(first + i): m for i, m in enumerate(parts)})

    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = net

        def forward(self, x):
            for m in self.m.values():
                x = m(x)
            return x

    stage = Stage()
    opt = torch.optim.AdamW(stage.parameters(), lr=1e-2, eps=1e-4)
    gen = torch.Generator().manual_seed(3)
    for _ in range(3):
        x, t = tokens(gen)
        opt.zero_grad()
        for i, (a, b) in enumerate(zip(x.chunk(2), t.chunk(2))):
            if world.size == 1:
                (ce(stage(a), b) / 2).backward()
            elif world.rank == 0:
                y = stage(a)
                dist.send(y.detach(), 1)
                g = torch.empty_like(y)
                dist.recv(g, 1)
                y.backward(g)
            else:
                h = torch.empty(*a.shape, D)
                dist.recv(h, 0)
                h.requires_grad_()
                (ce(stage(h), b) / (1 if world.bug == "last-only" and i else 2)).backward()
                dist.send(h.grad, 0)
        opt.step()


@hand(("scale", "gradient", ""), ("weight:3.weight",), forms=("gpipe", "1f1b", "interleaved"))
def pipelining(world):
    """torch.distributed.pipelining's schedules."""
    torch.manual_seed(8)
    net = nn.Sequential(nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, V))
    parts = {"interleaved": [[0], [1], [2], [3]]}.get(world.form, [[0, 1], [2, 3]])
    mine = parts[world.rank :: 2] if world.size > 1 else []
    for i in range(4) if world.size > 1 else []:
        if not any(i in p for p in mine):
            net[i] = nn.Identity()
    if world.size > 1:
        stages = []
        for index, part in enumerate(parts):
            if part in mine:
                m = nn.Sequential(*(net[i] if i in part else nn.Identity() for i in range(4)))
                stages.append(PipelineStage(m, index, len(parts), torch.device("cpu")))
        kind = {
            "gpipe": ScheduleGPipe,
            "1f1b": Schedule1F1B,
            "interleaved": ScheduleInterleaved1F1B,
        }[world.form]
        sched = kind(
            stages if world.form == "interleaved" else stages[0],
            n_microbatches=4,
            loss_fn=ce,
            scale_grads=world.bug != "scale",
        )
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    gen = torch.Generator().manual_seed(3)
    for _ in range(2):
        x, t = tokens(gen)
        opt.zero_grad()
        if world.size == 1:
            ce(net(x), t).backward()
        elif world.rank == 0:
            sched.step(x)
        else:
            sched.step(target=t, losses=[])
        opt.step()


@hand(("rate",), ("unsummed", "gradient", "", "sum over them is missing"))
def zero_redundancy(world):
    """torch's ZeroRedundancyOptimizer beside DDP."""
    torch.manual_seed(9)
    net = Tiny()
    model = DDP(net) if world.size > 1 and world.bug != "unsummed" else net
    if world.size > 1:
        opt = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-2)
    else:
        opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    loop(world, net, model, opt)


@hand(("gradient:head.weight",), ("forward:blocks.0",))
def joined(world):
    """Ranks have uneven inputs and the loop runs under join()."""
    torch.manual_seed(10)
    net = Tiny(1)
    model = DDP(net) if world.size > 1 else net
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    gen = torch.Generator().manual_seed(3)
    with Join([model]) if world.size > 1 else contextlib.nullcontext():
        for _ in range(3):
            x, t = tokens(gen)
            opt.zero_grad()
            ce(model(x[world.rank :: world.size]), t[world.rank :: world.size]).backward()
            opt.step()


@hand(("gradient:head.weight",), ("doubled", "gradient", "", "2 times"))
def functional(world):
    """torch.func.grad over functional_call, gradients put where the optimizer looks."""
    torch.manual_seed(11)
    net = Tiny(1)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    gen = torch.Generator().manual_seed(3)
    for _ in range(3):
        x, t = tokens(gen)
        x, t = x[world.rank :: world.size], t[world.rank :: world.size]
        net(x)  # some log the outputs
        params = {k: v.detach() for k, v in net.named_parameters()}
        grads = grad(lambda p: ce(functional_call(net, p, (x,)), t))(params)
        for k, v in net.named_parameters():
            g = grads[k].clone()
            if world.size > 1:
                dist.all_reduce(g)
                g /= 1 if world.bug == "doubled" else world.size
            v.grad = g
        opt.step()


@hand(("gradient:blocks.0.w2.bias",), ("rate",))
def flat_bucket(world):
    """One flat buffer of gradients, reduced at once and copied back."""
    torch.manual_seed(12)
    net = Tiny()

    def flat():
        if world.size > 1:
            grads = [p.grad for p in net.parameters()]
            buf = torch.cat([g.flatten() for g in grads])
            dist.all_reduce(buf)
            buf /= world.size
            for g, part in zip(grads, buf.split([g.numel() for g in grads])):
                g.copy_(part.view_as(g))

    loop(world, net, net, torch.optim.AdamW(net.parameters(), lr=1e-2), after=flat, clip=0.5)


@hand(("late", "gradient", "", ""), ("gradient:blocks.0.norm.weight",))
def overlapped_hooks(world):
    """Each gradient is reduced asynchronously as soon as it is there."""
    torch.manual_seed(13)
    net = Tiny()
    works = []

    def hook(p):
        works.append((p, dist.all_reduce(p.grad, async_op=True)))

    if world.size > 1:
        for n, p in net.named_parameters():
            if not (world.bug == "late" and n == "blocks.1.w1.weight"):
                p.register_post_accumulate_grad_hook(hook)

    def wait():
        for p, work in works:
            work.wait()
            p.grad /= world.size
        works.clear()

    loop(world, net, net, torch.optim.SGD(net.parameters(), lr=0.1), after=wait)


@hand(("gradient:head.weight",), ("forward:norm",), forms=("plain", "reentrant", "shard"))
def recomputed(world):
    """Checkpointed blocks under DDP or FSDP2."""
    torch.manual_seed(14)

    class Again(Tiny):
        def forward(self, x):
            x = self.emb(x)
            for b in self.blocks:
                x = checkpoint(b, x, use_reentrant=world.form == "reentrant")
            return self.head(self.norm(x))

    net = Again()
    model = net
    if world.size > 1 and world.form == "shard":
        for b in net.blocks:
            fully_shard(b)
        fully_shard(net)
    elif world.size > 1:
        model = DDP(net)
    loop(world, net, model, torch.optim.AdamW(net.parameters(), lr=1e-2))


class Halves(torch.autograd.Function):
    """All-gather of a dim, whose gradient each rank sums and takes its part of."""

    @staticmethod
    def forward(ctx, x, world):
        ctx.world = world
        out = [torch.empty_like(x) for _ in range(world.size)]
        dist.all_gather(out, x.contiguous())
        return torch.cat(out, 1)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        if ctx.world.bug != "no-reduce":
            dist.all_reduce(g)
        return g.chunk(ctx.world.size, 1)[ctx.world.rank], None


@hand(
    ("no-reduce", "backward|gradient", "k|v|emb"),
    ("shifted", "forward", "pos|"),
    ("gradient:q.weight",),
)
def context_parallel(world):
    """Each rank has a part of every sequence, and gathers keys and values."""
    torch.manual_seed(15)

    class Att(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.pos = nn.Embedding(V, D), nn.Embedding(16, D)
            self.q, self.k, self.v, self.head = (
                nn.Linear(D, D),
                nn.Linear(D, D),
                nn.Linear(D, D),
                nn.Linear(D, V),
            )

        def forward(self, x, start):
            p = torch.arange(
                start + (world.bug == "shifted" and world.rank),
                start + x.shape[1] + (world.bug == "shifted" and world.rank),
            )
            h = self.emb(x) + self.pos(p)
            q, k, v = self.q(h), self.k(h), self.v(h)
            if world.size > 1:
                k, v = Halves.apply(k, world), Halves.apply(v, world)
            see = torch.arange(k.shape[1])[None] <= torch.arange(start, start + x.shape[1])[:, None]
            a = (q @ k.transpose(1, 2) / D**0.5).masked_fill(~see, -1e9).softmax(-1)
            return self.head(h + a @ v)

    net = Att()
    opt = torch.optim.SGD(net.parameters(), lr=0.2)
    gen = torch.Generator().manual_seed(3)
    for _ in range(3):
        x, t = tokens(gen, 4, 9)
        x, t = x.chunk(world.size, 1)[world.rank], t.chunk(world.size, 1)[world.rank]
        opt.zero_grad()
        ce(net(x, world.rank * x.shape[1]), t).backward()
        if world.size > 1:
            for p in net.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world.size
        opt.step()


@hand(("swapped", "forward|gradient|weight|first weight", ""), ("weight:net.emb.weight",))
def by_hand_dtensor(world):
    """Parameters made DTensors one by one, gradients of them all DTensors."""
    torch.manual_seed(16)
    net = Tiny(1)
    if world.size > 1:
        mesh = init_device_mesh("cpu", (world.size,))
        for m in net.modules():
            for k, p in list(m.named_parameters(recurse=False)):
                place = [Shard(0)] if k == "weight" and p.ndim == 2 else [Replicate()]
                m.register_parameter(k, nn.Parameter(distribute_tensor(p.data, mesh, place)))
        if world.bug == "swapped":
            w = net.blocks[0].w1.weight.to_local()
            with torch.no_grad():
                w.copy_(w.flip(0))

    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            if world.size == 1:
                return self.net(x)
            full = {k: p.full_tensor() for k, p in self.net.named_parameters()}
            return functional_call(self.net, full, (x,))

    model = Local()
    loop(world, net, model, torch.optim.SGD(net.parameters(), lr=0.1), steps=2, mine=False)


@hand(("gradient:trunk.weight",), ("own-scale", "gradient|loss", ""))
def parameter_server(world):
    """Rank 0 gathers gradients, updates, and broadcasts weights."""
    torch.manual_seed(17)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.top = nn.Linear(4, 6), nn.Linear(6, 1)

        def forward(self, x):
            return self.top(self.trunk(x).relu())

    net = Net()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    gen = torch.Generator().manual_seed(3)
    for _ in range(3):
        x = torch.randn(8, 4, generator=gen)[world.rank :: world.size]
        opt.zero_grad()
        scale = 0.5 if world.bug == "own-scale" and world.rank else 1.0
        (net(x).square().mean() * scale).backward()
        for p in net.parameters():
            if world.size > 1:
                dist.all_reduce(p.grad)
                p.grad /= world.size
        opt.step()
        for p in net.parameters():
            if world.size > 1:
                dist.broadcast(p.data, 0)
