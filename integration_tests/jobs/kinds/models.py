"""Training loops by their model: layers of many kinds, and parameters of many dtypes."""

import random
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils.parametrizations import orthogonal, weight_norm

from integration_tests.jobs.kinds.job import (
    STEPS,
    WORDS,
    Job,
    Words,
    average,
    gradients,
    loss_of,
    reduced,
    trained,
)


def images(job: Job) -> None:
    """Batches of numbers."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, WORDS))
    model = job.parallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        x, y = job.values(8, 3, 8, 8), job.words()[0][:, 0]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def recurrent(job: Job) -> None:
    """A recurrent network, whose output is a tuple, and a padded batch."""
    parts = nn.Embedding(WORDS, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, WORDS)
    models = [job.parallel(part) for part in parts]
    optimizer = torch.optim.AdamW(chain(*(part.parameters() for part in parts)), lr=1e-2)
    for _ in range(STEPS):
        tokens, targets = job.words()
        weights = (tokens % 3 > 0).float()
        count = weights.sum()
        dist.all_reduce(count)
        optimizer.zero_grad()
        logits = models[2](models[1](models[0](tokens))[0])
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        ((losses * weights.flatten()).sum() / count * job.size).backward()
        optimizer.step()


def batch_norm(job: Job) -> None:
    """Statistics of a rank's own samples: not what one process computes."""
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model = job.parallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(job.values(8, 6)).square().mean().backward()
        optimizer.step()


def dropout(job: Job) -> None:
    """Random numbers of a rank's own."""
    net = Words(dropout=0.5)
    model = job.parallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(*job.words()).backward()
        optimizer.step()


class Packed(nn.Module):
    """Attention within documents that lie end to end in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(WORDS, 8), nn.Embedding(16, 8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, WORDS)

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """Logits `[rows, length, WORDS]`."""
        documents = (position_ids == 0).cumsum(1)
        x = self.embed(tokens) + self.positions(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        seen = (documents[:, :, None] == documents[:, None]).tril()
        logits: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=seen))
        return logits


def packed(job: Job) -> None:
    """Documents end to end in rows, with positions that begin anew in each."""
    net = Packed()
    model = job.parallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    places = torch.cat([torch.arange(n) for n in (3, 5, 1)]).repeat(8, 1)
    for step in range(STEPS):
        tokens, targets = job.words()
        ids = job.mine(places.roll(step * 3, 1))
        optimizer.zero_grad()
        loss_of(model(tokens, position_ids=ids), targets).backward()
        optimizer.step()


class Graph(nn.Module):
    """Two rounds of messages between neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Nodes `[N, 6]` and edges `[2, M]` to `[N, 3]`."""
        for layer in (self.first, self.second):
            y = layer(x)
            x = torch.zeros_like(y).index_add(0, edges[1], y[edges[0]]).tanh()
        return x


def graphs(job: Job) -> None:
    """All ranks have the whole graph, and the loss of some nodes each; the mistake: own means."""
    net = Graph()
    is_wrong = bool(job.fault)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    nodes = torch.randn(10, 6, generator=job.data)
    edges = torch.randint(10, (2, 30), generator=job.data)
    kinds = torch.randint(3, (10,), generator=job.data)
    known = torch.arange(10) if job.size == 1 else (torch.arange(7), torch.arange(7, 10))[job.rank]
    for _ in range(STEPS):
        losses = F.cross_entropy(net(nodes, edges)[known], kinds[known], reduction="sum")
        optimizer.zero_grad()
        (losses / (len(known) if is_wrong else 10 / job.size)).backward()
        average(job, gradients(net))
        optimizer.step()


class Settled(nn.Module):
    """A layer that is called until nothing changes; so is its gradient."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.mix, self.times = nn.Linear(6, 6), times
        with torch.no_grad():
            self.mix.weight.mul_(0.3)

    def forward(self, x: Tensor) -> Tensor:
        """Numbers `[N, 6]`."""
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(30):
                z = torch.tanh(self.mix(z) + x)
        z = torch.tanh(self.mix(z) + x)
        if z.requires_grad:
            at = z.detach().requires_grad_()
            once = torch.tanh(self.mix(at) + x)

            def settle(grad: Tensor) -> Tensor:
                found = grad
                for _ in range(self.times):
                    found = grad + torch.autograd.grad(once, at, found, retain_graph=True)[0]
                return found

            z.register_hook(settle)
        return z


def settled(job: Job) -> None:
    """An equilibrium, whose gradient is one too; the mistake: a rank stops before it is there."""
    net = nn.Sequential(nn.Linear(6, 6), Settled(1 if job.fault and job.rank else 30))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        net(job.values(8, 6)).square().mean().backward()
        average(job, gradients(net))
        optimizer.step()


class Deeper(nn.Module):
    """One block, as often as is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.out = nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, tokens: Tensor, depth: int) -> Tensor:
        """Logits `[N, length, 5]`."""
        x = self.embed(tokens)
        for _ in range(depth):
            x = x + self.block(x).tanh()
        out: Tensor = self.out(x)
        return out


def of_any_depth(job: Job) -> None:
    """A block that is repeated, by chance how often; the mistake: ranks roll dice of their own."""
    net = Deeper()
    dice = random.Random(4 + (job.rank if job.fault else 0))
    job.fault = ""
    model = job.parallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(STEPS + 1):
        tokens, targets = job.words()
        optimizer.zero_grad()
        loss_of(model(tokens, dice.randint(1, 4)), targets % 5).backward()
        optimizer.step()


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
    """A model that rounds the input of its last layer."""

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
