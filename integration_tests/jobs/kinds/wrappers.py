"""Training loops by what ranks have in common: DDP, FSDP2, stages, tables."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from integration_tests.jobs.kinds.job import STEPS, WORDS, Job, Words, average, gradients, loss_of


def scaled_by_hooks(job: Job) -> None:
    """Hooks of weights and of a module change gradients; the mistake: after they are reduced."""
    net = Words()
    is_wrong = bool(job.fault)
    job.fault = ""

    def halved(_: object, given: Any, __: object) -> tuple[Tensor]:
        return (given[0] * 0.5,)

    net.down.register_full_backward_hook(halved)
    net.embed.weight.register_hook(lambda grad: grad * 3)
    net.up.weight.register_hook(lambda grad: grad.clamp(-1e-4, 1e-4) if is_wrong else grad)
    model = job.parallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(*job.words()).backward()
        optimizer.step()


def exchanged_narrow(job: Job) -> None:
    """Gradients that ranks exchange in bfloat16, by a hook of DDP."""

    def narrow(
        _: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined] # DDP looks at it
    ) -> torch.futures.Future[Tensor]:
        held = bucket.buffer().bfloat16() / job.size
        work = dist.all_reduce(held, async_op=True)
        assert work is not None
        result: torch.futures.Future[Tensor] = work.get_future().then(
            lambda done: done.value()[0].float()
        )
        return result

    net = Words()
    model = job.parallel(net)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.register_comm_hook(None, narrow)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(*job.words()).backward()
        optimizer.step()


def sharded_accumulated(job: Job) -> None:
    """FSDP2 that reduces at the end of three microbatches, two models in one loss.

    The mistake: the last does not reduce.
    """
    net, other = Words(), Words()
    is_wrong = bool(job.fault)
    job.fault = ""
    for part in (net, other) if job.size > 1 else ():
        fully_shard(part.down)
        fully_shard(part, reshard_after_forward=False)
    weights = [*net.parameters(), *other.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    for _ in range(STEPS):
        for index in range(3):
            for part in (net, other):
                if isinstance(part, FSDPModule):
                    part.set_requires_gradient_sync(index == (1 if is_wrong else 2))
            tokens, targets = job.words()
            (loss_of(net(tokens) + other(tokens), targets) / 3).backward()
        nn.utils.clip_grad_norm_(weights, 0.1)
        optimizer.step()
        optimizer.zero_grad()


def pipelined(job: Job) -> None:
    """A model that torch's pipelining cuts into stages, of which each rank has one."""
    job.has_stages = True
    net = nn.Sequential(
        nn.Embedding(WORDS, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, WORDS)
    )
    if job.size > 1:
        for index in (range(2, 4), range(2))[job.rank]:
            net[index] = nn.Identity()
        stage = PipelineStage(net, job.rank, job.size, torch.device("cpu"))
        is_mean = job.fault != "sum"
        schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=loss_of, scale_grads=is_mean)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(STEPS):
        tokens, targets = job.words()
        optimizer.zero_grad()
        if job.size == 1:
            loss_of(net(tokens), targets).backward()
        elif job.rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=targets)
        optimizer.step()


class Summed(torch.autograd.Function):
    """A sum over ranks, of which each gets the whole gradient."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        """Sum."""
        out = x.clone()
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> Tensor:
        """The same."""
        return grads[0]


class Shared(torch.autograd.Function):
    """A tensor that all ranks compute with, whose gradient is the sum of theirs."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        """The same."""
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> Tensor:
        """Sum."""
        total = grads[0].contiguous()
        dist.all_reduce(total)
        return total


class Table(nn.Module):
    """A table of words, cut by rows over ranks, at both ends of a model."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        whole = torch.randn(WORDS, 8)
        self.first, self.count = job.rank * WORDS // job.size, WORDS // job.size
        self.words = nn.Parameter(whole[self.first :][: self.count].clone())
        self.mix = nn.Linear(8, 8)
        self.is_wrong = bool(job.fault)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of this rank's words."""
        here = tokens - self.first
        known = (here >= 0) & (here < self.count)
        found = F.embedding(here.clamp(0, self.count - 1), self.words) * known[..., None]
        x = self.mix(Summed.apply(found))  # type: ignore[no-untyped-call]
        held = x if self.is_wrong else Shared.apply(x)  # type: ignore[no-untyped-call]
        logits: Tensor = held @ self.words.T
        return logits


def tied_rows(job: Job) -> None:
    """A table that is cut by words and used twice; the mistake: a gradient is not summed."""
    job.has_stages = True
    net = Table(job)
    job.fault = ""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(STEPS):
        tokens, targets = job.words()
        optimizer.zero_grad()
        logits = net(tokens)
        total = Summed.apply(logits.exp().sum(-1)).log()  # type: ignore[no-untyped-call]
        here = targets - net.first
        known = (here >= 0) & (here < net.count)
        told = logits.gather(-1, here.clamp(0, net.count - 1)[..., None])[..., 0] * known
        (total - Summed.apply(told)).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def exchanged(mine: Tensor) -> Tensor:
    """Send each rank its part of `[ranks, ...]`, and return the parts that others have sent."""
    theirs = torch.empty_like(mine, memory_format=torch.contiguous_format)
    dist.all_to_all_single(theirs, mine.contiguous())
    return theirs


class Exchanged(torch.autograd.Function):
    """As `exchanged`, and gradients come back."""

    @staticmethod
    def forward(_: Any, mine: Tensor) -> Tensor:
        """`[ranks, ...]` to the same."""
        return exchanged(mine)

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> Tensor:
        """The same."""
        return exchanged(grads[0])


class Ranking(nn.Module):
    """Tables of which each rank has some, and a part that all have."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(5)
        rows = [torch.randn(12, 4, generator=made) for _ in range(2)]
        self.tables = nn.ModuleDict(
            {f"t{i}": nn.Embedding(12, 4, _weight=rows[i]) for i in range(2) if i % size == rank}
        )
        self.top = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        self._size = size

    def forward(self, clicks: Tensor, every: Tensor) -> Tensor:
        """Own rows `[N, 2]`, and those of all ranks, to `[N, 1]`."""
        found = torch.stack([table(every[:, int(name[1])]) for name, table in self.tables.items()])
        if self._size > 1:
            found = Exchanged.apply(found[0].unflatten(0, (self._size, -1)))  # type: ignore[no-untyped-call]
        out: Tensor = self.top(found.transpose(0, 1).reshape(len(clicks), 8))
        return out


def tables(job: Job) -> None:
    """Tables on a rank each, as recommenders have them; the mistake: they are not averaged."""
    net = Ranking(job.rank, job.size)
    is_wrong = bool(job.fault)
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        every = torch.randint(12, (8, 2), generator=job.data)
        wanted = job.values(8, 1)
        optimizer.zero_grad()
        (net(job.mine(every), every) - wanted).square().mean().backward()
        average(job, gradients(net.top))
        for grad in gradients(net.tables) if not is_wrong else ():
            grad.div_(job.size)
        optimizer.step()


def served(job: Job) -> None:
    """One rank updates and sends its weights to the others; the mistake: all but one of them."""
    net = Words()
    is_wrong = bool(job.fault)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2) if job.rank == 0 else None
    for _ in range(STEPS):
        net.zero_grad()
        net(*job.words()).backward()
        average(job, gradients(net))
        if optimizer is not None:
            optimizer.step()
        for name, weight in net.named_parameters():
            if not (is_wrong and name == "up.bias"):
                dist.broadcast(weight.detach(), 0)


def short(job: Job) -> None:
    """Each rank for itself on all samples, and the second one ends a step earlier."""
    job.has_stages = True
    net = Words()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    for _ in range(STEPS - job.rank):
        optimizer.zero_grad()
        net(*job.words()).backward()
        optimizer.step()
