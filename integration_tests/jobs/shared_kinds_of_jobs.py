"""Training loops whose ranks share tables, updates or outputs, with a mistake of their own."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from integration_tests.jobs.kinds_of_jobs import STEPS, WORDS, Job, Words, loss_of

Found = tuple[int, str, str]
"""Step, phase and a part of the name of a first difference."""


def average(job: Job, tensors: Iterable[Tensor]) -> None:
    """Average over ranks, in place."""
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor.div_(job.size)


def gradients(net: nn.Module) -> list[Tensor]:
    """Those that there are."""
    return [p.grad for p in net.parameters() if p.grad is not None]


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
    """What all ranks compute with: their gradients are terms of its gradient."""

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


class Orthogonal(torch.optim.Optimizer):
    """Muon, whose matrices ranks update in turn and then share."""

    def __init__(self, weights: Iterable[Tensor], job: Job) -> None:
        super().__init__(weights, {"lr": 0.02, "momentum": 0.9})
        self._job, self._is_wrong = job, bool(job.fault)

    @torch.no_grad()
    def step(self, _closure: object = None) -> None:  # type: ignore[override]
        """Update own matrices and send them round."""
        for group in self.param_groups:
            for index, weight in enumerate(group["params"]):
                owner = index % self._job.size
                if owner == self._job.rank:
                    held = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                    held.lerp_(weight.grad, 0.1)
                    left, _, right = torch.linalg.svd(held, full_matrices=False)
                    weight.add_(left @ right, alpha=-group["lr"])
                if not (self._is_wrong and index == 1):
                    dist.broadcast(weight, owner)


def orthogonal(job: Job) -> None:
    """Muon for matrices and AdamW for the rest; the mistake: a matrix is not sent."""
    net = Words()
    two = [p for p in net.parameters() if p.ndim == 2]
    first = Orthogonal(two, job)
    job.fault = ""
    model = job.parallel(net)
    second = torch.optim.AdamW([p for p in net.parameters() if p.ndim < 2], lr=1e-2)
    for _ in range(STEPS):
        net.zero_grad()
        model(*job.words()).backward()
        first.step()
        second.step()


def shared_state(job: Job) -> None:
    """torch's ZeroRedundancyOptimizer; the mistake: another decay on one rank's part."""
    from torch.distributed.optim import (  # noqa: PLC0415 - warns of what it is made of
        ZeroRedundancyOptimizer,
    )

    net = Words()
    is_wrong = bool(job.fault) and job.rank == 1
    job.fault = ""
    model = job.parallel(net)
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.AdamW, lr=1e-2, weight_decay=0.5 if is_wrong else 0.01
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(*job.words()).backward()
        optimizer.step()


class Gathered(torch.autograd.Function):
    """Rows of all ranks, whose gradients go back to where they are from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, job: Job) -> Tensor:
        """All rows."""
        ctx.job = job
        parts = [torch.empty_like(x) for _ in range(job.size)]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Sum of what ranks have of own rows."""
        total = grads[0].clone()
        dist.all_reduce(total)
        return total.chunk(ctx.job.size)[ctx.job.rank], None


class Towers(nn.Module):
    """Pictures and words in one space."""

    def __init__(self) -> None:
        super().__init__()
        self.see, self.read = nn.Linear(6, 8), nn.Sequential(nn.Embedding(WORDS, 8), nn.Tanh())
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, pixels: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Both, of length one."""
        words = self.read(tokens).mean(1)
        return F.normalize(self.see(pixels), dim=1), F.normalize(words, dim=1) * self.scale.exp()


def contrasted(job: Job) -> None:
    """Each picture beside the words of all ranks; the mistake: those of others get no gradient."""
    net = Towers()
    is_wrong = bool(job.fault)
    job.fault = ""
    model = job.parallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        seen, read = model(job.values(8, 6), job.words()[0])
        if is_wrong:
            parts = [torch.empty_like(read) for _ in range(job.size)]
            dist.all_gather(parts, read.detach())
            parts[job.rank] = read
        else:
            parts = [Gathered.apply(read, job)]  # type: ignore[no-untyped-call]
        wanted = torch.arange(len(seen)) + job.rank * len(seen)
        F.cross_entropy(seen @ torch.cat(parts).T, wanted).backward()
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


SHARED: dict[Callable[[Job], None], Found] = {
    tied_rows: (1, "gradient", "mix"),
    orthogonal: (1, "weight", "up.weight"),
    shared_state: (1, "weight", ""),
    contrasted: (1, "backward", ""),
    served: (1, "weight", "up.bias"),
    sharded_accumulated: (1, "gradient", ""),
}
"""Loops, and where each is found to be wrong with its mistake."""
