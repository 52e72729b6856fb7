"""Training loops that look other than their reference, and have a real mistake beside that."""

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from integration_tests.jobs.kinds.job import STEPS, WORDS, Job, Words, loss_of, reduced, summed
from integration_tests.jobs.kinds.padded import PAD, Reader, padded

_LENGTHS = (9, 4, 7, 5, 3, 8, 6, 9)


def _optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)


def _samples(job: Job) -> list[Tensor]:
    """Samples of other lengths than each other; the padding is a word like any other."""
    return [torch.randint(0, WORDS, (size,), generator=job.data) for size in _LENGTHS]


def _losses(net: nn.Module, tokens: Tensor, real: Tensor) -> Tensor:
    """Sum of the losses of all tokens that are no padding."""
    losses = F.cross_entropy(net(tokens)[:, :-1].mT, tokens[:, 1:], reduction="none")
    return (losses * real[:, :-1] * real[:, 1:]).sum()


def _wrong(grad: Tensor) -> Tensor:
    """A gradient half of whose rows are lost."""
    found = grad.clone()
    found[::2] = 0
    return found


def padded_as_words(job: Job) -> None:
    """Nothing tells that samples are the reference's; a projection's gradient is the fault."""
    net = Reader()
    if job.fault and job.size > 1:
        net.query.weight.register_hook(_wrong)
    optimizer = _optimizer(net)
    for _ in range(STEPS):
        samples = _samples(job)
        optimizer.zero_grad()
        mine = samples[job.rank :: job.size]
        for index in range(0, len(mine), 2):
            tokens, real = padded(mine[index : index + 2])
            _losses(net, tokens, real).div(sum(_LENGTHS) - len(_LENGTHS)).backward()
        summed(job, net)
        optimizer.step()


def ordered_otherwise(job: Job) -> None:
    """Ranks go through a step's samples backwards; a loss that is doubled is the fault."""
    net = Words()
    optimizer = _optimizer(net)
    for _ in range(STEPS):
        tokens = torch.randint(WORDS, (8, 10), generator=job.data)
        mine = tokens if job.size == 1 else tokens.flip(0)[job.rank :: job.size]
        optimizer.zero_grad()
        for part in mine.chunk(2):
            loss = loss_of(net(part[:, :-1]), part[:, 1:]) / 2
            (2 * loss if job.fault and job.size > 1 else loss).backward()
        reduced(job, net.parameters())
        optimizer.step()


def dropped_otherwise(job: Job) -> None:
    """Ranks draw other masks than one process; a norm that counts twice is the fault."""
    net = Words(dropout=0.3)
    optimizer = _optimizer(net)
    for _ in range(STEPS):
        tokens, targets = job.words()
        optimizer.zero_grad()
        loss_of(net(tokens), targets).backward()
        reduced(job, net.parameters())
        norm = nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
        if job.fault and job.size > 1:
            norm = norm * 2**0.5
        nn.utils.clip_grads_with_norm_(net.parameters(), 1e-1, norm)
        optimizer.step()


def dropped_unsummed(job: Job) -> None:
    """Ranks draw other masks than one process; a gradient that is not reduced is the fault."""
    net = Words(dropout=0.3)
    optimizer = _optimizer(net)
    for _ in range(STEPS):
        tokens, targets = job.words()
        optimizer.zero_grad()
        loss_of(net(tokens), targets).backward()
        weights = dict(net.named_parameters())
        if job.fault:
            del weights["norm.weight"]
        job.fault = ""
        reduced(job, weights.values())
        optimizer.step()


class _Recurrent(nn.Module):
    """Words one after the other, through a GRU that is given them without what is padded before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(WORDS, 8), nn.GRU(8, 8, batch_first=True)
        self.mix, self.out = nn.Linear(8, 8), nn.Linear(8, WORDS)

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits of each token, `[samples, length, WORDS]`."""
        order = (
            (attention_mask == 0).long().argsort(dim=1, stable=True)[..., None].expand(-1, -1, 8)
        )
        mixed, _ = self.gru(self.embed(tokens).gather(1, order))
        logits: Tensor = self.out(self.mix(mixed.gather(1, order.argsort(1))))
        return logits


def shifted_for_a_gru(job: Job) -> None:
    """What a GRU gives lies and is padded otherwise; what a projection is given is the fault."""
    net = _Recurrent()
    if job.fault and job.size > 1:
        net.mix.register_forward_pre_hook(lambda _module, args: args[0] * (1 + job.rank))
    optimizer = _optimizer(net)
    for _ in range(STEPS):
        samples = _samples_without_padding(job)
        optimizer.zero_grad()
        mine, size = samples[job.rank :: job.size], 8 if job.size == 1 else 2
        for index in range(0, len(mine), size):
            tokens, real = padded(mine[index : index + size], left=True)
            logits = net(tokens, attention_mask=real)
            losses = F.cross_entropy(logits[:, :-1].mT, tokens[:, 1:], reduction="none")
            (losses * real[:, :-1] * real[:, 1:]).sum().div(sum(_LENGTHS)).backward()
        summed(job, net)
        optimizer.step()


def values_otherwise(job: Job) -> None:
    """Samples that are no tokens; rank 1 is given others than the reference, which is the fault."""
    net = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 4))
    optimizer = _optimizer(net)
    for _ in range(STEPS):
        values, targets = job.values(8, 6), job.values(8, 4)
        given = values + 0.01 * job.rank if job.fault else values
        optimizer.zero_grad()
        (net(given) - targets).square().mean().backward()
        reduced(job, net.parameters())
        optimizer.step()


class _Masked(Reader):
    """The same, but for what it gives where there is padding.

    Args:
        blank: Whether that is zero.
    """

    def __init__(self, *, blank: bool) -> None:
        super().__init__()
        self.blank = blank
        self.mix = nn.Linear(8, 8)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits of each token, `[samples, length, WORDS]`."""
        x = self.mix(self.norm(self.embed(tokens)))
        if self.blank and attention_mask is not None:
            x = x * attention_mask[..., None]
        logits: Tensor = self.out(self.norm(x))
        return logits


def blank_where_padded(job: Job) -> None:
    """Ranks compute zeros where there is padding; a projection's gradient is the fault."""
    net = _Masked(blank=job.size > 1)
    if job.fault and job.size > 1:
        net.mix.weight.register_hook(_wrong)
    optimizer = _optimizer(net)
    for _ in range(STEPS):
        tokens, real = padded(_samples_without_padding(job))
        tokens, real = job.mine(tokens), job.mine(real)
        optimizer.zero_grad()
        masked = functools.partial(net, attention_mask=real)
        losses = F.cross_entropy(masked(tokens)[:, :-1].mT, tokens[:, 1:], reduction="none")
        (losses * real[:, :-1] * real[:, 1:]).sum().div(8 * len(_LENGTHS)).backward()
        summed(job, net)
        optimizer.step()


def _samples_without_padding(job: Job) -> Sequence[Tensor]:
    return [torch.randint(PAD + 1, WORDS, (size,), generator=job.data) for size in _LENGTHS]
