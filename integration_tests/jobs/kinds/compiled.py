"""Training loops in which torch.compile has a model, a loss, an update or all of a step."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from integration_tests.jobs.kinds.job import STEPS, Job, Words, loss_of, reduced, trained


def compiled(job: Job) -> None:
    """A model that torch.compile has traced, by its name of before."""
    net = Words()
    model = torch.compile(job.parallel(net), backend="aot_eager")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        model(*job.words()).backward()
        optimizer.step()


def compiled_step(job: Job) -> None:
    """A function that calls the model is compiled, so nobody is told that it is called."""
    net = Words()
    step = torch.compile(lambda x, y: loss_of(net(x), y), backend="aot_eager")
    trained(job, net.parameters(), lambda: step(*job.words()))


def compiled_whole(job: Job) -> None:
    """All of a step is compiled, its update with it; one process computes it as it is written."""
    net = Words()
    weights = list(net.parameters())
    optimizer = torch.optim.AdamW(weights, lr=1e-2)

    def step(tokens: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        loss_of(net(tokens), targets).backward()
        reduced(job, weights)
        nn.utils.clip_grad_norm_(weights, 0.5)
        optimizer.step()

    taken = torch.compile(step, backend="aot_eager") if job.size > 1 else step
    for _ in range(STEPS):
        taken(*job.words())


def compiled_later(job: Job) -> None:
    """A step as it is written, one whose loss is compiled, and two that are compiled whole."""
    net = Words()
    weights = list(net.parameters())
    optimizer = torch.optim.AdamW(weights, lr=1e-2)

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return loss_of(net(tokens), targets)

    def step(tokens: Tensor, targets: Tensor, loss: Callable[..., Tensor] = loss) -> None:
        optimizer.zero_grad()
        loss(tokens, targets).backward()
        reduced(job, weights)
        optimizer.step()

    step(*job.words())
    step(*job.words(), torch.compile(loss, backend="aot_eager"))
    whole = torch.compile(step, backend="aot_eager")
    for _ in range(2):
        whole(*job.words())


class Plain(torch.optim.Optimizer):
    """Gradient descent, written by a user of torch."""

    def __init__(self, weights: Iterable[Tensor], lr: float) -> None:
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self, _closure: object = None) -> None:  # type: ignore[override]
        """Update."""
        for group in self.param_groups:
            for weight in group["params"]:
                weight.add_(weight.grad, alpha=-group["lr"])


def compiled_update(job: Job) -> None:
    """The update alone is compiled, and must be one graph."""
    net = Words()
    model = job.parallel(net)
    optimizer = Plain(net.parameters(), lr=0.1)
    update = torch.compile(optimizer.step, backend="aot_eager", fullgraph=True)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(*job.words()).backward()
        update()
