"""Training loops that do without a called model, an optimizer, dense or real numbers."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call, grad, vmap
from torch.nn.utils.parametrizations import orthogonal, weight_norm
from torch.utils.checkpoint import checkpoint

from integration_tests.jobs.kinds_of_jobs import STEPS, WORDS, Job, Words, loss_of

Loss = Callable[[], Tensor]


def reduced(job: Job, parameters: Iterable[Tensor]) -> None:
    """Average gradients by hand."""
    for parameter in parameters if job.size > 1 and job.fault != "no-sync" else ():
        if parameter.grad is not None:
            held = parameter.grad
            dist.all_reduce(torch.view_as_real(held) if held.is_complex() else held)
            held /= job.size


def trained(job: Job, parameters: Iterable[Tensor], loss: Loss) -> None:
    """Update with AdamW after gradients were averaged by hand."""
    weights = list(parameters)
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss().backward()
        reduced(job, weights)
        optimizer.step()


def whole_again(job: Job) -> None:
    """A model that is computed again as a whole, the old way: without gradients at first."""
    net = Words()

    def loss() -> Tensor:
        tokens, targets = job.words()
        wanted = torch.zeros(1, requires_grad=True)
        logits = checkpoint(lambda _, x: net(x), wanted, tokens, use_reentrant=True)
        return loss_of(logits, targets)

    trained(job, net.parameters(), loss)


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


def tied_apart(job: Job) -> None:
    """Modules that are called one by one, the last with the first one's weight."""
    first, last = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS, bias=False)
    between = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    last.weight = first.weight

    def loss() -> Tensor:
        tokens, targets = job.words()
        return loss_of(last(between(first(tokens))), targets)

    trained(job, [*first.parameters(), *between.parameters()], loss)


class Method(Words):
    """A model whose loss is a method of its own."""

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Loss, without a call of the model."""
        return loss_of(self.out(self.block(self.embed(tokens))), targets)


def method(job: Job) -> None:
    """A method of the model is called in its place."""
    net = Method()
    trained(job, net.parameters(), lambda: net.loss(*job.words()))


def tensors(job: Job) -> None:
    """No modules: weights are tensors."""
    first, second = torch.randn(6, 8).requires_grad_(), torch.randn(8, 1).requires_grad_()
    weights = [first, second]
    trained(job, weights, lambda: ((job.values(8, 6) @ first).tanh() @ second).square().mean())


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
        for copy, weight in zip(held, weights, strict=True):
            assert weight.grad is not None
            copy.grad = weight.grad.float()
        optimizer.step()
        with torch.no_grad():
            for copy, weight in zip(held, weights, strict=True):
                weight.copy_(copy)


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


class Frequencies(nn.Module):
    """A complex weight for each frequency, and weights in dtypes that are not computed with."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        narrow = torch.randn(8, 8).to(torch.float8_e4m3fn)
        self.narrow = nn.Parameter(narrow, requires_grad=False)
        whole = torch.randint(-9, 9, (8, 8), dtype=torch.int8)
        self.whole = nn.Parameter(whole, requires_grad=False)
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Numbers `[N, 8]` to `[N, 1]`."""
        mixed = torch.fft.irfft(torch.fft.rfft(x) * self.gain, n=8)
        out: Tensor = self.out(mixed + x @ self.narrow.float() + x @ self.whole.float())
        return out


def frequencies(job: Job) -> None:
    """Parameters that are complex, in float8 and in int8."""
    net = Frequencies()
    weights = [weight for weight in net.parameters() if weight.requires_grad]
    trained(job, weights, lambda: net(job.values(8, 8)).square().mean())


def lazy(job: Job) -> None:
    """Weights that the first call makes; models that are called for shapes, counts and a trace."""
    net = nn.Sequential(nn.Embedding(WORDS, 8), nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(WORDS))
    with torch.device("meta"):
        Words()(torch.zeros(2, 9, dtype=torch.long))
    with FakeTensorMode():
        loss_of(Words()(torch.zeros(2, 9, dtype=torch.long)), torch.zeros(2, 9).long()).backward()
    torch.jit.trace(nn.Linear(4, 4), torch.randn(2, 4))
    torch.manual_seed(3)
    optimizer = None
    for _ in range(STEPS):
        tokens, targets = job.words()
        loss = loss_of(net(tokens), targets)
        optimizer = optimizer or torch.optim.AdamW(net.parameters(), lr=1e-2)
        optimizer.zero_grad()
        loss.backward()
        reduced(job, net.parameters())
        optimizer.step()


class Beside(torch.autograd.Function):
    """Something that is looked at and gets no gradient."""

    @staticmethod
    def forward(_: Any, x: Tensor, _looked_at: Tensor) -> Tensor:
        """The first of both."""
        return x.clone()

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """None for what is looked at."""
        return grads[0], None


class Masked(nn.Module):
    """Some words are never said."""

    def __init__(self) -> None:
        super().__init__()
        self.guess = nn.Linear(WORDS, WORDS)

    def forward(self, logits: Tensor) -> Tensor:
        """Logits, of which some are minus infinity."""
        said: Tensor = Beside.apply(logits, self.guess(logits))  # type: ignore[no-untyped-call]
        return said.masked_fill(torch.arange(WORDS) % 7 == 3, -torch.inf)


def masked(job: Job) -> None:
    """Outputs that are not finite, or get no gradient; weights made of others."""
    norm, turn = weight_norm(nn.Linear(8, 8)), orthogonal(nn.Linear(8, 8))
    net = nn.Sequential(nn.Embedding(WORDS, 8), norm, turn, nn.Linear(8, WORDS), Masked())

    def loss() -> Tensor:
        tokens, targets = job.words()
        return loss_of(net(tokens), torch.where(targets % 7 == 3, targets - 1, targets))

    trained(job, net.parameters(), loss)


class Seen(nn.Module):
    """Words about what is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.see = nn.Embedding(WORDS, 8), nn.Linear(6, 8)
        self.out = nn.Linear(8, WORDS)

    def forward(self, input_ids: Tensor, pixels: Tensor) -> Tensor:
        """Logits `[N, length, WORDS]`."""
        logits: Tensor = self.out(self.embed(input_ids) + self.see(pixels)[:, None])
        return logits


def one_prompt(job: Job) -> None:
    """All samples have the same words, about different pictures."""
    net = Seen()

    def loss() -> Tensor:
        prompt = job.mine((torch.arange(9) * 3 % WORDS).repeat(8, 1))
        return loss_of(net(input_ids=prompt, pixels=job.values(8, 6)), job.words()[1])

    trained(job, net.parameters(), loss)


def lengths(job: Job) -> None:
    """Rows of lengths of their own."""
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    def loss() -> Tensor:
        rows = [torch.full((n, 6), 0.1 * n) for n in (2, 5, 3, 4)]
        mine = rows[job.rank * 4 // job.size : (job.rank + 1) * 4 // job.size]
        batch = torch.nested.nested_tensor(mine, layout=torch.jagged)
        total: Tensor = net(batch).values().square().sum()
        return total / 14 * job.size

    trained(job, net.parameters(), loss)


ODD: dict[str, Callable[[Job], None]] = {
    loop.__name__: loop
    for loop in (
        whole_again,
        compiled_step,
        compiled_whole,
        compiled_later,
        compiled_update,
        tied_apart,
        method,
        tensors,
        by_hand,
        per_sample,
        copies,
        left_out,
        sparse,
        frequencies,
        lazy,
        masked,
        one_prompt,
        lengths,
    )
}
"""Those that compute what one process does."""


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
