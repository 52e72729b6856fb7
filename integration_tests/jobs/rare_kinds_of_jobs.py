"""Training loops of fields beside language models, each with a mistake of its own."""

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from integration_tests.jobs.kinds_of_jobs import STEPS, WORDS, Job, Words, loss_of
from integration_tests.jobs.shared_kinds_of_jobs import Found, average, gradients


def temperature(job: Job) -> None:
    """Actor, critic and a temperature, whose losses are there before any of them is updated.

    The mistake: the temperature is not reduced.
    """
    actor, judge = nn.Linear(6, 4), nn.Linear(6, 1)
    log_heat = torch.zeros((), requires_grad=True)
    is_wrong = bool(job.fault)
    of_actor = torch.optim.Adam(actor.parameters(), lr=1e-2)
    of_judge = torch.optim.Adam(judge.parameters(), lr=1e-2)
    of_heat = torch.optim.Adam([log_heat], lr=1e-1)
    for _ in range(STEPS):
        seen, gain = job.values(8, 6), job.values(8)
        told, worth = actor(seen).log_softmax(-1), judge(seen)[:, 0]
        entropy = -(told.exp() * told).sum(-1)
        missed = (worth - gain).square().mean()
        heat = log_heat.exp().detach()
        lost = -(told[:, 0] * (gain - worth).detach() + heat * entropy).mean()
        for optimizer, loss in ((of_judge, missed), (of_actor, lost)):
            optimizer.zero_grad()
            loss.backward()
            average(job, gradients(judge if loss is missed else actor))
            optimizer.step()
        of_heat.zero_grad()
        (log_heat * (entropy.detach() - 1.2).mean()).backward()
        assert log_heat.grad is not None
        if not is_wrong:
            average(job, [log_heat.grad])
        of_heat.step()


def swapped(mine: Tensor) -> Tensor:
    """What each rank has for each rank, `[ranks, ...]`, goes there."""
    theirs = torch.empty_like(mine, memory_format=torch.contiguous_format)
    dist.all_to_all_single(theirs, mine.contiguous())
    return theirs


class Swapped(torch.autograd.Function):
    """As `swapped`, and gradients come back."""

    @staticmethod
    def forward(_: Any, mine: Tensor) -> Tensor:
        """`[ranks, ...]` to the same."""
        return swapped(mine)

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> Tensor:
        """The same."""
        return swapped(grads[0])


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
            found = Swapped.apply(found[0].unflatten(0, (self._size, -1)))  # type: ignore[no-untyped-call]
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


def learns_to_learn(job: Job) -> None:
    """Each sample's own update is a part of the loss (MAML); the mistake: on a rank it is not."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    is_first_order = bool(job.fault) and job.rank == 1
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(STEPS):
        shown, asked = job.values(4, 5, 4), job.values(4, 5, 4)
        total = torch.zeros(())
        for task in range(len(shown)):
            weights: dict[str, Tensor] = dict(net.named_parameters())
            missed = functional_call(net, weights, shown[task]).square().mean()
            grads = torch.autograd.grad(missed, list(weights.values()), create_graph=True)
            moved = {
                name: weight - 0.5 * (grad.detach() if is_first_order else grad)
                for (name, weight), grad in zip(weights.items(), grads, strict=True)
            }
            total = total + functional_call(net, moved, asked[task]).sin().mean()
        optimizer.zero_grad()
        (total / len(shown)).backward()
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


def speech(job: Job) -> None:
    """Sounds of lengths of their own (CTC); the mistake: a rank takes all for the longest."""
    net = nn.Sequential(nn.Conv1d(5, 7, 3, padding=1), nn.ReLU(), nn.Conv1d(7, 6, 1))
    is_wrong = bool(job.fault) and job.rank == 1
    job.fault = ""
    model = job.parallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(STEPS):
        lengths = job.mine(torch.arange(8) % 3 + 9 + step)
        sounds = job.values(8, 5, 12 + step)
        said = job.mine(torch.arange(24).reshape(8, 3) % 5 + 1)
        told = model(sounds).permute(2, 0, 1).log_softmax(-1)
        lengths = torch.full_like(lengths, 12 + step) if is_wrong else lengths
        optimizer.zero_grad()
        F.ctc_loss(told, said, lengths, torch.full((len(said),), 3)).backward()
        optimizer.step()


def hardest(job: Job) -> None:
    """The hardest half of all samples counts; the mistake: the hardest half of each rank's."""
    net = Words()
    is_wrong = bool(job.fault)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(STEPS):
        tokens, targets = job.words()
        losses = F.cross_entropy(net(tokens).transpose(1, 2), targets, reduction="none").mean(1)
        all_losses = losses.detach().repeat(job.size)
        if not is_wrong and job.size > 1:
            dist.all_gather_into_tensor(all_losses, losses.detach())
        least = all_losses.topk(len(all_losses) // 2).values[-1]
        optimizer.zero_grad()
        (losses[losses >= least].sum() / 4 * job.size).backward()
        average(job, gradients(net))
        optimizer.step()


def taught_by_itself(job: Job) -> None:
    """A slow copy teaches, about a centre of what it says (DINO); the mistake: of a rank's own."""
    net, slow = nn.Linear(6, 5), nn.Linear(6, 5)
    slow.load_state_dict(net.state_dict())
    centre = torch.zeros(5)
    is_wrong = bool(job.fault)
    job.fault = ""
    model = job.parallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(STEPS):
        seen = job.values(8, 6)
        with torch.no_grad():
            said = slow(seen + 0.1)
        optimizer.zero_grad()
        taught = ((said - centre) / 0.1).softmax(-1)
        (-(taught * model(seen).log_softmax(-1)).sum(-1).mean()).backward()
        optimizer.step()
        mean = said.mean(0)
        if not is_wrong:
            average(job, [mean])
        centre = 0.5 * centre + 0.5 * mean
        with torch.no_grad():
            for held, weight in zip(slow.parameters(), net.parameters(), strict=True):
                held.lerp_(weight, 0.5)


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


def packed_away(job: Job) -> None:
    """What the backward needs is put away meanwhile; the mistake: a rank gets it back rounded."""
    net = Words()
    is_wrong = bool(job.fault) and job.rank == 1
    job.fault = ""
    model = job.parallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def away(kept: Tensor) -> Any:
        return (kept.bfloat16(), kept.dtype) if is_wrong and kept.is_floating_point() else kept

    def back(kept: Any) -> Tensor:
        held: Tensor = kept[0].to(kept[1]) if isinstance(kept, tuple) else kept
        return held

    for _ in range(STEPS):
        optimizer.zero_grad()
        with saved_tensors_hooks(away, back):
            loss = model(*job.words())
        loss.backward()
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


def denoised(job: Job) -> None:
    """Noise of a time of its own is taken out of each sample; the mistake: other times."""
    net = nn.Sequential(nn.Linear(7, 16), nn.SiLU(), nn.Linear(16, 6))
    is_wrong = bool(job.fault) and job.rank == 1
    job.fault = ""
    model = job.parallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(STEPS):
        clean, noise = job.values(8, 6), job.values(8, 6)
        when = job.mine(torch.rand(8, 1, generator=job.data))
        mixed = (1 - when) * clean + when * noise
        told = when.flip(0) if is_wrong else when
        optimizer.zero_grad()
        (model(torch.cat([mixed, told], 1)) - (noise - clean)).square().mean().backward()
        optimizer.step()


def thawed_layers(job: Job) -> None:
    """Norms and the last layer of a frozen model are trained; the mistake: a norm is forgotten."""
    net: Words = Words().requires_grad_(requires_grad=False)
    for part in (net.norm, net.out):
        part.requires_grad_()
    net.norm.bias.requires_grad = not job.fault
    job.fault = ""
    model = job.parallel(net)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
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


RARE: dict[Callable[[Job], None], Found] = {
    temperature: (3, "gradient", "parameter"),
    tables: (1, "gradient", "tables.t"),
    graphs: (1, "loss", ""),
    learns_to_learn: (1, "gradient", ""),
    settled: (1, "backward", "1"),
    speech: (1, "loss", ""),
    hardest: (2, "loss", ""),
    taught_by_itself: (2, "loss", ""),
    shaken: (2, "forward", "embed"),
    packed_away: (1, "backward", "out"),
    of_any_depth: (1, "forward", "out"),
    denoised: (1, "input", ""),
    thawed_layers: (1, "gradient", "norm.bias"),
    factored: (2, "weight", ""),
}
"""Loops, and where each is found to be wrong with its mistake."""
