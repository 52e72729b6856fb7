"""Training loops whose ranks are given the same samples in another form, or more of them."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from integration_tests.jobs.kinds.job import STEPS, WORDS, Job, summed

PAD = 0
_LENGTHS = (9, 4, 7, 5, 3, 8, 6, 9)


class Reader(nn.Module):
    """A causal language model with a block of attention, and a norm that is called twice.

    Args:
        more: What comes of one more call of the norm, before the others; None: there is none.
    """

    def __init__(self, more: float | None = None) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, 8), nn.LayerNorm(8)
        self.out, self.query, self.key = nn.Linear(8, WORDS), nn.Linear(8, 8), nn.Linear(8, 8)
        self.more = more

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits of each token, `[samples, length, WORDS]`."""
        x = self.embed(tokens)
        if self.more is not None:
            x = x + self.more * self.norm(x.flip(-1))
        x = self.norm(x)
        seen = torch.ones(*tokens.shape, tokens.shape[1]).tril()
        if attention_mask is not None:
            seen = seen * attention_mask[:, None]
        scores = self.query(x) @ self.key(x).transpose(1, 2) + (1 - seen) * -1e9
        logits: Tensor = self.out(self.norm(x + scores.softmax(-1) @ x))
        return logits


def sequences(job: Job) -> list[Tensor]:
    """Samples of other lengths than each other; none has the padding inside."""
    return [torch.randint(1, WORDS, (size,), generator=job.data) for size in _LENGTHS]


def padded(samples: Sequence[Tensor], *, left: bool = False) -> tuple[Tensor, Tensor]:
    """Pad to the longest; and what is not padding."""
    longest = max(map(len, samples))
    spaces = [(longest - len(s), 0) if left else (0, longest - len(s)) for s in samples]
    tokens = [F.pad(s, space, value=PAD) for s, space in zip(samples, spaces, strict=True)]
    real = [F.pad(torch.ones_like(s), space) for s, space in zip(samples, spaces, strict=True)]
    return torch.stack(tokens), torch.stack(real)


def _padded_to_longest(job: Job, *, left: bool, has_mask: bool) -> None:
    """Every second sample, microbatches of two: each has another length than the reference's."""
    net = Reader()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)
    for _ in range(STEPS):
        samples = sequences(job)
        count = sum(_LENGTHS) - len(_LENGTHS)
        optimizer.zero_grad()
        mine = samples[job.rank :: job.size]
        for index in range(0, len(mine), 2):
            tokens, real = padded(mine[index : index + 2], left=left)
            logits = net(tokens, attention_mask=real) if has_mask else net(tokens)
            losses = F.cross_entropy(logits[:, :-1].mT, tokens[:, 1:], reduction="none")
            (losses * real[:, :-1] * real[:, 1:]).sum().div(count).backward()
        summed(job, net)
        optimizer.step()


def padded_right(job: Job) -> None:
    """Padding follows, and nobody says what it is."""
    _padded_to_longest(job, left=False, has_mask=False)


def padded_left(job: Job) -> None:
    """Padding comes first, and a mask says so."""
    _padded_to_longest(job, left=True, has_mask=True)


def masked_right(job: Job) -> None:
    """Padding follows, and a mask says so."""
    _padded_to_longest(job, left=False, has_mask=True)


def with_more(job: Job) -> None:
    """Ranks look at samples that one process does not; where that is the fault, with gradients."""
    net = Reader()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        tokens, targets = job.words()
        loss = F.cross_entropy(net(tokens).mT, targets, reduction="sum") / 72
        if job.size > 1:
            seen = F.cross_entropy(net(tokens.flip(1)).mT, targets)
            loss = loss + seen if job.fault == "used" else loss
        loss.backward()
        summed(job, net)
        optimizer.step()


def called_more(job: Job) -> None:
    """Ranks call a norm once more, before the others; where that is the fault, for something."""
    net = Reader({"used": 0.1, "": 0.0}[job.fault] if job.size > 1 else None)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        tokens, targets = job.words()
        F.cross_entropy(net(tokens).mT, targets, reduction="sum").div(72).backward()
        summed(job, net)
        optimizer.step()


def called_apart(job: Job) -> None:
    """Ranks call a norm outside of the model; where that is the fault, they change it by that."""
    net = Reader()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        tokens, targets = job.words()
        logits = net(tokens)
        if job.size > 1:
            hidden = net.norm(torch.linspace(-1, 1, 120).view(3, 5, 8))
            if job.fault == "used":
                logits = logits + net.out(hidden.mean((0, 1)))
        F.cross_entropy(logits.mT, targets, reduction="sum").div(72).backward()
        summed(job, net)
        optimizer.step()
