"""Training loops with a mistake of their own, as users make them where ranks come together."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from integration_tests.jobs.kinds_of_jobs import STEPS, WORDS, Job, Words, loss_of
from integration_tests.jobs.rare_kinds_of_jobs import RARE
from integration_tests.jobs.shared_kinds_of_jobs import SHARED, Found, average, gradients


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
    optimizers: dict[Tensor, torch.optim.Optimizer]
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


def sharpness(job: Job) -> None:
    """Gradients where the loss is worst nearby; the mistake: each rank goes its own way there."""
    net = Words()
    is_wrong = bool(job.fault)
    weights: list[Tensor] = list(net.parameters())
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


FURTHER: dict[str, tuple[Callable[[Job], None], Found]] = {
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
        sharpness: (1, "loss", ""),
        surgery: (1, "gradient", ""),
        policies: (1, "gradient", ""),
        grown: (2, "evaluation", "embed"),
        looked_ahead: (3, "forward", ""),
        **SHARED,
        **RARE,
    }.items()
}
"""Loops, and of each with its mistake the step, the phase and the name of the first difference."""
