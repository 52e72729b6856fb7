"""Training loops with a mistake of their own, as users make them where ranks come together."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from integration_tests.kinds_of_jobs import STEPS, WORDS, Job, Words, loss_of


def average(job: Job, tensors: Iterable[Tensor]) -> None:
    """Average over ranks, in place."""
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor.div_(job.size)


def gradients(net: nn.Module) -> list[Tensor]:
    """Those that there are."""
    return [p.grad for p in net.parameters() if p.grad is not None]


class Rounded(torch.autograd.Function):
    """Rounds, lets gradients through, and counts them in a buffer on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor) -> Tensor:
        """The nearest eighth."""
        ctx.seen = seen
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """As if nothing had been rounded."""
        ctx.seen += grads[0].abs().sum()
        return grads[0], None


class Quantized(Words):
    """What goes into the last layer is rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def block(self, x: Tensor) -> Tensor:
        """Rounded."""
        out: Tensor = Rounded.apply(super().block(x), self.seen)  # type: ignore[no-untyped-call]
        return out


def side_effects(job: Job) -> None:
    """A function of autograd that rounds and keeps a count; the mistake: gradients by its count."""
    net = Quantized()
    is_wrong = bool(job.fault)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        net(*job.words()).backward()
        average(job, gradients(net))
        seen = net.get_buffer("seen") / job.size  # of a mean over a share of the samples
        if not is_wrong:
            dist.all_reduce(seen)
        for grad in gradients(net):
            grad.div_(1 + seen)
        optimizer.step()


def in_backward(job: Job) -> None:
    """Each weight has an optimizer, that updates it during the backward; one is not reduced."""
    net = Words()
    wrong = net.norm.weight if job.fault else None
    optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in net.parameters()}

    def update(weight: Tensor) -> None:
        assert weight.grad is not None
        if weight is not wrong:
            average(job, [weight.grad])
        optimizers[weight].step()
        optimizers[weight].zero_grad()

    for weight in net.parameters():
        weight.register_post_accumulate_grad_hook(update)
    for _ in range(STEPS):
        net(*job.words()).backward()


def scaled_by_hooks(job: Job) -> None:
    """Hooks of weights and of a module change gradients; the mistake: after they are reduced."""
    net = Words()
    is_wrong = bool(job.fault)
    job.fault = ""
    net.down.register_full_backward_hook(lambda _, given, __: (given[0] * 0.5,))
    net.embed.weight.register_hook(lambda grad: grad * 3)
    net.up.weight.register_hook(lambda grad: grad.clamp(-1e-4, 1e-4) if is_wrong else grad)
    model = job.parallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(*job.words()).backward()
        optimizer.step()


@contextmanager
def swapped(net: nn.Module, other: dict[str, Tensor]) -> Iterator[None]:
    """Other weights in a model, for a while."""
    own = {name: p.detach().clone() for name, p in net.named_parameters()}
    net.load_state_dict(other, strict=False)
    yield
    net.load_state_dict(own, strict=False)


def averaged_in_place(job: Job) -> None:
    """Averaged weights are put into the model to evaluate; the mistake: averaged too early."""
    net = Words()
    is_wrong = bool(job.fault)
    job.fault = ""
    model = job.parallel(net)
    shadow = {name: p.detach().clone() for name, p in net.named_parameters()}

    def follow() -> None:
        for name, weight in net.named_parameters():
            shadow[name].lerp_(weight.detach(), 0.5)

    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(*job.words()).backward()
        if is_wrong:
            follow()
        optimizer.step()
        if not is_wrong:
            follow()
        with swapped(net, shadow), torch.no_grad():
            net(*job.words())


def penalized(job: Job) -> None:
    """A critic with a penalty on its gradient; the mistake: divided by all ranks' samples."""
    judge = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    is_wrong = bool(job.fault)
    optimizer = torch.optim.Adam(judge.parameters(), lr=1e-2)
    for _ in range(STEPS):
        real = job.values(8, 6).requires_grad_()
        told = judge(real)
        [slope] = torch.autograd.grad(told.sum(), real, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square()
        optimizer.zero_grad()
        (told.mean() + (penalty.sum() / 8 if is_wrong else penalty.mean())).backward()
        average(job, gradients(judge))
        optimizer.step()


def odd_last(job: Job) -> None:
    """Five microbatches, two a step, and one in the last; a rate that begins anew.

    The mistake: the last is divided as if there were two.
    """
    net = Words()
    is_wrong = bool(job.fault)
    job.fault = ""
    model = job.parallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    rates = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2)
    for first in range(0, 5, 2):
        count = min(2, 5 - first)
        for index in range(count):
            waits = index < count - 1 and isinstance(model, DistributedDataParallel)
            with model.no_sync() if waits else nullcontext():  # type: ignore[operator]
                (model(*job.words()) / (2 if is_wrong else count)).backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.step()


class Rows(Dataset[Tensor]):
    """Rows of words that are made by number."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        made = torch.Generator().manual_seed(index)
        return torch.randint(WORDS, (10,), generator=made)


def epochs(job: Job) -> None:
    """Two epochs in another order each, by workers; the mistake: one rank stays with the first."""
    net = Words()
    is_wrong = bool(job.fault) and job.rank == 1
    job.fault = ""
    model = job.parallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    sampler: DistributedSampler[Tensor] = DistributedSampler(Rows(), shuffle=True, seed=5)
    batches = DataLoader(
        Rows(), 8 // job.size, sampler=sampler, num_workers=2, persistent_workers=True
    )
    for epoch in range(2):
        sampler.set_epoch(0 if is_wrong else epoch)
        for rows in batches:
            optimizer.zero_grad()
            model(rows[:, :-1], rows[:, 1:]).backward()
            optimizer.step()


def thawed(job: Job) -> None:
    """Layers are trained from the second step on, in a group of their own.

    The mistake: one rank thaws them a step late.
    """
    net = Words()
    late = int(bool(job.fault) and job.rank == 1)
    job.fault = ""
    net.embed.requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for step in range(STEPS + 1):
        if step == 1:
            optimizer.add_param_group({"params": [*net.embed.parameters()], "lr": 0.05})
        net.embed.requires_grad_(requires_grad=step >= 1 + late)
        net(*job.words()).backward()
        for weight in net.parameters():
            held = torch.zeros_like(weight) if weight.grad is None else weight.grad
            average(job, [held])
        optimizer.step()
        optimizer.zero_grad()


class Again(Words):
    """Its block is computed again, the old way."""

    def block(self, x: Tensor) -> Tensor:
        """Without gradients at first."""
        out: Tensor = checkpoint(super().block, x, use_reentrant=True)
        return out


def blocks_again(job: Job) -> None:
    """Blocks that are computed again the old way, beside DDP; the mistake: one gradient is late."""
    net = Again()
    is_wrong = bool(job.fault)
    job.fault = ""
    model = job.parallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(*job.words()).backward()
        if is_wrong and job.rank:
            net.up.weight.grad = torch.zeros_like(net.up.weight)
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


def sharpness(job: Job) -> None:
    """Gradients where the loss is worst nearby; the mistake: each rank goes its own way there."""
    net = Words()
    is_wrong = bool(job.fault)
    weights = list(net.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        tokens, targets = job.words()
        net(tokens, targets).backward()
        if not is_wrong:
            average(job, gradients(net))
        norm = torch.stack([g.norm() for g in gradients(net)]).norm()
        moves = [0.05 * g / norm for g in gradients(net)]
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_add_(weights, moves)
        net(tokens, targets).backward()
        with torch.no_grad():
            torch._foreach_sub_(weights, moves)
        average(job, gradients(net))
        optimizer.step()
        optimizer.zero_grad()


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


def surgery(job: Job) -> None:
    """Gradients of two losses, the second without what is against the first.

    The mistake: taken away before ranks reduce.
    """
    net = Words()
    is_wrong = bool(job.fault)
    weights = list(net.parameters())
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    for _ in range(STEPS):
        tokens, targets = job.words()
        logits = net(tokens)
        both = [
            list(torch.autograd.grad(loss, weights, retain_graph=True))
            for loss in (loss_of(logits, targets), logits.square().mean())
        ]
        if not is_wrong:
            average(job, [*both[0], *both[1]])
        for weight, one, other in zip(weights, *both, strict=True):
            along = (one * other).sum() / one.square().sum().clamp(min=1e-12)
            weight.grad = one + other - along * one
        if is_wrong:
            average(job, gradients(net))
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


def policies(job: Job) -> None:
    """Proximal policy optimization: two passes over what an old policy has said.

    The mistake: each rank's own mean of advantages.
    """
    net = Words()
    is_wrong = bool(job.fault)
    job.fault = ""
    model = job.parallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def log_probability(tokens: Tensor, targets: Tensor) -> Tensor:
        told: Tensor = model(tokens).log_softmax(-1)
        return told.gather(-1, targets[..., None])[..., 0].sum(-1)

    for _ in range(STEPS):
        tokens, targets = job.words()
        gains = (tokens.float().mean(1) - targets.float().mean(1)) + job.values(8)
        mean = gains.mean()
        if not is_wrong:
            average(job, [mean])
        with torch.no_grad():
            old = log_probability(tokens, targets)
        for _ in range(2):
            ratio = (log_probability(tokens, targets) - old).exp()
            gained = torch.minimum(
                ratio * (gains - mean), ratio.clamp(0.8, 1.2) * (gains - mean)
            ).mean()
            optimizer.zero_grad()
            (-gained).backward()
            optimizer.step()


def grown(job: Job) -> None:
    """More words after the first step, with an optimizer of their own.

    The mistake: each rank makes up its own.
    """
    net = Words()
    is_wrong = bool(job.fault) and job.rank == 1
    job.fault = ""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(STEPS + 1):
        if step == 1:
            rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(9 + is_wrong))
            net.embed.weight = nn.Parameter(torch.cat([net.embed.weight.detach(), rows]))
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        tokens, targets = job.words()
        optimizer.zero_grad()
        net(tokens + (4 if step else 0), targets).backward()
        average(job, gradients(net))
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


def looked_ahead(job: Job) -> None:
    """Weights that follow others slowly, every second step; the mistake: from a stale copy."""
    net = Words()
    is_wrong = bool(job.fault) and job.rank == 1
    job.fault = ""
    model = job.parallel(net)
    slow = copy.deepcopy([p.detach() for p in net.parameters()])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        model(*job.words()).backward()
        optimizer.step()
        for held, weight in zip(slow, net.parameters(), strict=True) if step % 2 else ():
            with torch.no_grad():
                if not is_wrong:
                    held.lerp_(weight, 0.5)
                weight.copy_(held)


FURTHER: dict[str, tuple[Callable[[Job], None], tuple[int, str, str]]] = {
    loop.__name__: (loop, found)
    for loop, found in {
        side_effects: (1, "gradient", ""),
        in_backward: (1, "gradient", "norm.weight"),
        scaled_by_hooks: (1, "gradient", "up.weight"),
        averaged_in_place: (2, "evaluation", ""),
        penalized: (1, "loss", ""),
        odd_last: (3, "gradient", ""),
        epochs: (3, "input", ""),
        thawed: (2, "gradient", "embed.weight"),
        blocks_again: (1, "gradient", "up.weight"),
        tied_rows: (1, "gradient", "mix"),
        sharpness: (1, "loss", ""),
        orthogonal: (1, "weight", "up.weight"),
        shared_state: (1, "weight", ""),
        contrasted: (1, "backward", ""),
        surgery: (1, "gradient", ""),
        served: (1, "weight", "up.bias"),
        policies: (1, "gradient", ""),
        grown: (2, "evaluation", "embed"),
        sharded_accumulated: (1, "gradient", ""),
        looked_ahead: (3, "forward", ""),
    }.items()
}
"""Loops, and of each with its mistake the step, the phase and the name of the first difference."""
