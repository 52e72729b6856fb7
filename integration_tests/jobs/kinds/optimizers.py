"""Training loops by their update: optimizers, closures, scaled losses, averages of weights."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.func import functional_call, grad, vmap

from integration_tests.jobs.kinds.job import (
    STEPS,
    WORDS,
    Job,
    Words,
    average,
    gradients,
    loss_of,
    reduced,
)


def closure(job: Job) -> None:
    """The update calls what computes the loss, as Lightning has it."""
    net = Words()
    model = job.parallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(STEPS):
        tokens, targets = job.words()

        def loss(tokens: Tensor = tokens, targets: Tensor = targets) -> float:
            optimizer.zero_grad()
            value: Tensor = model(tokens, targets)
            value.backward()
            return value.item()

        optimizer.step(loss)


def many_evaluations(job: Job) -> None:
    """Several evaluations in one update."""
    net = Words()
    model = job.parallel(net)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2)
    for _ in range(STEPS):
        tokens, targets = job.words()

        def loss(tokens: Tensor = tokens, targets: Tensor = targets) -> Tensor:
            optimizer.zero_grad()
            value: Tensor = model(tokens, targets)
            value.backward()
            return value

        optimizer.step(loss)


def two_optimizers(job: Job) -> None:
    """Parts of a model with an optimizer each."""
    net = Words()
    model = job.parallel(net)
    weights = list(net.parameters())
    first = torch.optim.AdamW(weights[:4], lr=1e-2)
    second = torch.optim.SGD(weights[4:], lr=1e-1, momentum=0.9)
    rates = torch.optim.lr_scheduler.LambdaLR(second, lambda step: 1 / (step + 1))
    for _ in range(STEPS):
        for optimizer in (first, second):
            optimizer.zero_grad()
        model(*job.words()).backward()
        for optimizer in (first, second):
            optimizer.step()
        rates.step()


def scaled(job: Job) -> None:
    """A scaled loss, and clipping; a loss outside of the model."""
    net = Words()
    model = job.parallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for _ in range(STEPS):
        tokens, targets = job.words()
        optimizer.zero_grad()
        scaler.scale(loss_of(model(tokens), targets)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()


def left_out(job: Job) -> None:
    """A scaler of losses leaves the second update out; norms of two groups, each clipped alone."""
    net = Words()
    weights = list(net.parameters())
    fault, job.fault = job.fault, "" if job.fault == "own-scale" else job.fault
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(STEPS + 1):
        tokens, targets = job.words()
        optimizer.zero_grad()
        loss = loss_of(net(tokens), targets)
        is_large = step == 1 and job.rank == job.size - 1
        scaler.scale(loss * torch.inf if is_large else loss).backward()
        if fault == "own-scale" and job.size > 1:  # whether all are finite is asked too early
            scaler.unscale_(optimizer)
        reduced(job, weights)
        if fault != "own-scale" or job.size == 1:
            scaler.unscale_(optimizer)
        for some, most in ((weights[:1], 0.01), (weights[1:], 0.5)):
            nn.utils.clip_grad_norm_(some, most)
        scaler.step(optimizer)
        scaler.update()


def left_out_by_norm(job: Job) -> None:
    """An update whose norm is too large is left out, and a norm is logged of what was clipped."""
    net = Words()
    weights = list(net.parameters())
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    for step in range(STEPS + 1):
        tokens, targets = job.words()
        optimizer.zero_grad()
        loss = loss_of(net(tokens), targets)
        (1000 * loss if step == 1 else loss).backward()
        reduced(job, weights)
        norm = nn.utils.clip_grad_norm_(weights, 0.5)
        nn.utils.clip_grad_norm_(weights, torch.inf)
        if norm < 50:
            optimizer.step()


def made_state(job: Job) -> None:
    """Ranks make the optimizer's state before they train, as to load it; the rate begins at 0."""
    net = Words()
    weights = list(net.parameters())
    optimizer = torch.optim.SGD(weights, lr=1e-2, momentum=0.9)
    if job.size > 1:
        get_optimizer_state_dict(net, optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 2))
    for _ in range(STEPS):
        tokens, targets = job.words()
        optimizer.zero_grad()
        loss_of(net(tokens), targets).backward()
        reduced(job, weights)
        optimizer.step()
        schedule.step()


def owned_groups(job: Job) -> None:
    """Two groups, each clipped by its own norm, of one of which a rank updates nothing (ZeRO-1)."""
    net = Words()
    weights = list(net.parameters())
    own = weights[job.rank :: job.size]
    optimizer = torch.optim.AdamW(own, lr=1e-2)
    for _ in range(STEPS):
        tokens, targets = job.words()
        net.zero_grad()
        loss_of(net(tokens), targets).backward()
        reduced(job, weights)
        for group, most in ((weights[:1], 0.01), (weights[1:], 0.5)):
            norm = nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])
            mine = [p for p in group if any(p is one for one in own)]
            if mine:
                nn.utils.clip_grads_with_norm_(mine, most, norm)
        optimizer.step()
        for place, weight in enumerate(weights):
            if job.size > 1:
                dist.broadcast(weight.data, place % job.size)


def evaluated(job: Job) -> None:
    """Averaged weights, and an evaluation after each update."""
    net = Words()
    model = job.parallel(net)
    averaged = torch.optim.swa_utils.AveragedModel(net)
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(*job.words()).backward()
        optimizer.step()
        averaged.update_parameters(net)
        net.eval()
        with torch.no_grad():
            model(*job.words())
        net.train()


def moving_average(job: Job) -> None:
    """A moving average of the weights by hand, with which is evaluated."""
    net = Words()
    model = job.parallel(net)
    average = copy.deepcopy(net).requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(STEPS):
        tokens, targets = job.words()
        optimizer.zero_grad()
        model(tokens, targets).backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(average.parameters(), net.parameters(), strict=True):
                old.lerp_(new, 0.1)
            average(tokens, targets)


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


def factored(job: Job) -> None:
    """State of rows and of columns (Adafactor); the mistake: a rank forgets at another rate."""
    net = Words()
    decay = -0.5 if job.fault and job.rank else -0.8
    job.fault = ""
    model = job.parallel(net)
    optimizer = torch.optim.Adafactor(net.parameters(), lr=1e-2, beta2_decay=decay)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(*job.words()).backward()
        optimizer.step()


def shaken(job: Job) -> None:
    """Noise is added to weights after each update (Langevin); the mistake: each rank's own."""
    net = Words()
    made = torch.Generator().manual_seed(job.rank if job.fault else 0)
    job.fault = ""
    model = job.parallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(*job.words()).backward()
        optimizer.step()
        with torch.no_grad():
            for weight in net.parameters():
                weight.add_(torch.randn(weight.shape, generator=made), alpha=1e-2)


def by_hand(job: Job) -> None:
    """No optimizer: weights are changed in place."""
    net = Words()
    model = job.parallel(net)
    for _ in range(STEPS):
        net.zero_grad()
        model(*job.words()).backward()
        with torch.no_grad():
            for weight in net.parameters():
                assert weight.grad is not None
                weight.sub_(0.1 * weight.grad)


def per_sample(job: Job) -> None:
    """Gradients of samples one by one, clipped, by transforms of functions."""
    net = Words()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def loss(weights: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss_of(functional_call(net, dict(weights), (x[None],)), y[None])

    for _ in range(STEPS):
        weights = {name: weight.detach() for name, weight in net.named_parameters()}
        grads = vmap(grad(loss), in_dims=(None, 0, 0))(weights, *job.words())
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        for name, weight in net.named_parameters():
            clipped = (0.5 / norms).clamp(max=1.0)
            weight.grad = torch.einsum("n,n...->...", clipped, grads[name]) / len(norms)
        reduced(job, net.parameters())
        optimizer.step()


def copies(job: Job) -> None:
    """A model in bfloat16, and copies in float32 that are updated."""
    net = Words().bfloat16()
    weights = list(net.parameters())
    held = [weight.detach().float().clone().requires_grad_() for weight in weights]
    optimizer = torch.optim.AdamW(held, lr=1e-2)
    for _ in range(STEPS):
        net.zero_grad()
        net(*job.words()).backward()
        reduced(job, weights)
        for master, weight in zip(held, weights, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(held, weights, strict=True):
                weight.copy_(master)


def sparse(job: Job) -> None:
    """Gradients that leave zeros out."""
    net = nn.Sequential(nn.Embedding(WORDS, 8, sparse=True), nn.Linear(8, WORDS))
    model = job.parallel(net)
    optimizers = [
        torch.optim.SparseAdam(net[0].parameters(), lr=1e-2),
        torch.optim.AdamW(net[1].parameters(), lr=1e-2),
    ]
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        tokens, targets = job.words()
        loss_of(model(tokens), targets).backward()
        for optimizer in optimizers:
            optimizer.step()
