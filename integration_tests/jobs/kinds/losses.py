"""Training loops by what they learn: losses, and models that learn from each other."""

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from integration_tests.jobs.kinds.job import (
    STEPS,
    WORDS,
    Job,
    Words,
    average,
    gradients,
    loss_of,
    summed,
)


def two_models(job: Job) -> None:
    """Generator and discriminator, whose layers have the same names, in turn."""
    maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
    judge = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    make, tell = job.parallel(maker), job.parallel(judge)
    of_maker = torch.optim.Adam(maker.parameters(), lr=1e-2)
    of_judge = torch.optim.Adam(judge.parameters(), lr=2e-2)
    for _ in range(STEPS):
        noise, real = job.values(8, 4), job.values(8, 6)
        of_judge.zero_grad()
        made = make(noise).detach()
        (F.softplus(-tell(real)).mean() + F.softplus(tell(made)).mean()).backward()
        of_judge.step()
        of_maker.zero_grad()
        F.softplus(-tell(make(noise))).mean().backward()
        of_maker.step()


def critic(job: Job) -> None:
    """A critic that is updated twice as often as what it criticises, each by its optimizer."""
    maker = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 6))
    judge = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    make, tell = job.parallel(maker), job.parallel(judge)
    of_maker = torch.optim.RMSprop(maker.parameters(), lr=1e-3)
    of_judge = torch.optim.RMSprop(judge.parameters(), lr=1e-3)
    for _ in range(STEPS):
        for _ in range(2):
            of_judge.zero_grad()
            with torch.no_grad():
                made = make(job.values(8, 4))
            (tell(made).mean() - tell(job.values(8, 6)).mean()).backward()
            of_judge.step()
        of_maker.zero_grad()
        judge.requires_grad_(requires_grad=False)
        (-tell(make(job.values(8, 4))).mean()).backward()
        judge.requires_grad_(requires_grad=True)
        of_maker.step()


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


def distilled(job: Job) -> None:
    """A teacher that is not trained tells what the student should say."""
    teacher, net = Words().eval(), Words()
    model = job.parallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(STEPS):
        tokens, _ = job.words()
        with torch.no_grad():
            wanted = teacher(tokens).softmax(-1)
        optimizer.zero_grad()
        told = model(tokens).log_softmax(-1)
        (-(wanted * told).sum(-1).mean()).backward()
        optimizer.step()


def preferences(job: Job) -> None:
    """Direct preference optimization: chosen and rejected answers, policy and reference."""
    net = Words()
    before = copy.deepcopy(net).eval()
    model = job.parallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def log_probability(policy: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        told: Tensor = policy(tokens).log_softmax(-1)
        return told.gather(-1, targets[..., None]).squeeze(-1).sum(-1)

    for _ in range(STEPS):
        chosen, rejected = job.words(), job.words()
        both = [torch.cat(pair) for pair in zip(chosen, rejected, strict=True)]
        with torch.no_grad():
            old, worse = log_probability(before, both[0], both[1]).chunk(2)
        optimizer.zero_grad()
        new, bad = log_probability(model, both[0], both[1]).chunk(2)
        (-F.logsigmoid(0.1 * ((new - old) - (bad - worse))).mean()).backward()
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


def cancelling(job: Job) -> None:
    """A critic, whose losses of ranks are large and nearly cancel."""
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)
    signs = job.mine(torch.tensor([1.0] * 4 + [-1.0] * 4))
    for _ in range(STEPS):
        optimizer.zero_grad()
        scores = net(job.values(8, 6))[:, 0] + 1e3
        loss = (signs * scores).sum() / 8
        if job.fault == "loss":
            loss = loss * (1 + 1e-3 * job.rank)
        loss.backward()
        summed(job, net)
        optimizer.step()
