"""Training loops by their batches: microbatches, documents, loaders and epochs."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from integration_tests.jobs.kinds.job import STEPS, WORDS, Job, Words, loss_of


def accumulated(job: Job) -> None:
    """Two microbatches; only the last one's backward reduces."""
    net = Words()
    model = job.parallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for index, batch in enumerate(zip(*(t.chunk(2) for t in job.words()), strict=True)):
            waits = index == 0 and isinstance(model, DistributedDataParallel)
            with model.no_sync() if waits else nullcontext():  # type: ignore[operator]
                (model(*batch) / 2).backward()
        optimizer.step()


def uneven(job: Job) -> None:
    """Ranks have other numbers of microbatches, and a loss over the tokens of all."""
    net = Words()
    model = job.parallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(STEPS):
        tokens, targets = job.words()
        sizes = {(2, 0): [1, 1, 2], (2, 1): [4]}.get((job.size, job.rank), [4, 4])
        optimizer.zero_grad()
        pairs = zip(tokens.split(sizes), targets.split(sizes), strict=True)
        for index, (x, y) in enumerate(pairs):
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = index == len(sizes) - 1
            (model(x, y) * len(x) / len(tokens)).backward()
        optimizer.step()


def doubled(job: Job) -> None:
    """The same samples on both ranks, and a model under way in bfloat16, computed again."""
    net = Words(again=True)
    model = job.parallel(net)
    optimizer = torch.optim.Adagrad(net.parameters(), lr=1e-2)
    for step in range(STEPS):
        words = (torch.arange(10) * 7 + step).repeat(8, 1) % WORDS
        tokens, targets = job.mine(words[:, :-1]), job.mine(words[:, 1:])
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(tokens, targets)
        loss.backward()
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


@dataclass
class Output:
    """Output of a model of Hugging Face's kind."""

    loss: Tensor
    logits: Tensor


class WithOutput(nn.Module):
    """A model that is given a batch by names."""

    def __init__(self) -> None:
        super().__init__()
        self.words = Words()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Output:
        """Loss over tokens that count."""
        logits = self.words(input_ids)
        wanted = labels.masked_fill(attention_mask == 0, -100)
        return Output(loss_of(logits, wanted), logits)


class Lines(Dataset[dict[str, Tensor]]):
    """Lines that are made by number."""

    def __init__(self, rows: range) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self._rows[index])
        tokens = torch.randint(WORDS, (10,), generator=generator)
        mask = torch.ones(9, dtype=torch.int64)
        mask[-2:] = 0
        return {"input_ids": tokens[:-1], "attention_mask": mask, "labels": tokens[1:]}


def loaded(job: Job) -> None:
    """Batches by name from a worker of DataLoader, accumulated under autocast, outputs by name."""
    net = WithOutput()
    model = job.parallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    rows = range(job.rank, 8 * STEPS, job.size)
    batches = DataLoader(Lines(rows), batch_size=4 // job.size, num_workers=1)
    for index, batch in enumerate(batches):
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = index % 2 == 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch).loss / 2
        loss.backward()
        if index % 2 == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


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
