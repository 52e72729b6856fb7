"""More training loops, as users of torch.compile, FSDP2, LoRA, DPO and the like write them."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from integration_tests.jobs.kinds_of_jobs import STEPS, WORDS, Job, Words, loss_of


def compiled(job: Job) -> None:
    """A model that torch.compile has traced, by its name of before."""
    net = Words()
    model = torch.compile(job.parallel(net), backend="aot_eager")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        model(*job.words()).backward()
        optimizer.step()


def sharded_again(job: Job) -> None:
    """FSDP2, and activations that are computed again."""
    net = Words(again=True)
    if job.size > 1 and job.fault != "no-sync":
        fully_shard(net.up)
        fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(STEPS):
        tokens, targets = job.words()
        net(tokens, targets).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


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


class LowRank(nn.Module):
    """A frozen product and a delta of low rank, as peft has it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Sum of both."""
        result: Tensor = self.base(x) + 2.0 * self.lora_B(self.lora_A(x))
        return result


def low_rank(job: Job) -> None:
    """Deltas of low rank alone are trained; half of them are zeros at first."""
    net = Words().requires_grad_(requires_grad=False)
    net.up, net.down = LowRank(net.up), LowRank(net.down)  # type: ignore[assignment]
    model = job.parallel(net)
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(*job.words()).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
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


@dataclass
class Output:
    """What a model of Hugging Face's kind gives."""

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


MORE: dict[str, Callable[[Job], None]] = {
    loop.__name__: loop
    for loop in (
        compiled,
        sharded_again,
        moving_average,
        low_rank,
        packed,
        uneven,
        critic,
        distilled,
        preferences,
        loaded,
    )
}
"""Those that compute what one process does."""


def short(job: Job) -> None:
    """Each rank for itself on all samples, and the second one ends a step earlier."""
    job.has_stages = True
    net = Words()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    for _ in range(STEPS - job.rank):
        optimizer.zero_grad()
        net(*job.words()).backward()
        optimizer.step()
