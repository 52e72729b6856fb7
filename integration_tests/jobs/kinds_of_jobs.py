"""Training loops of many kinds, each as its user would write it, on one rank or on two with DDP."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

STEPS = 2
WORDS = 20


class Job:
    """What a loop is given.

    Args:
        fault: "no-sync": the first model is not reduced. "sum": microbatches are summed up.
    """

    def __init__(self, fault: str) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.fault, self.has_stages = fault, False
        self.data = torch.Generator().manual_seed(1)
        torch.manual_seed(3)

    def parallel(self, model: nn.Module, **options: bool) -> nn.Module:
        """Reduce its gradients, if there is anything to reduce."""
        fault, self.fault = self.fault, ""
        if self.size == 1 or fault == "no-sync":
            return model
        return DistributedDataParallel(model, **options)  # type: ignore[arg-type]

    def mine(self, batch: Tensor) -> Tensor:
        """This rank's samples: all where ranks have stages."""
        return batch if self.has_stages else batch.chunk(self.size)[self.rank]

    def words(self) -> tuple[Tensor, Tensor]:
        """This rank's tokens, and those that follow them."""
        tokens = self.mine(torch.randint(WORDS, (8, 10), generator=self.data))
        return tokens[:, :-1], tokens[:, 1:]

    def values(self, *shape: int) -> Tensor:
        """This rank's samples of a batch of numbers."""
        return self.mine(torch.randn(*shape, generator=self.data))


class Words(nn.Module):
    """A language model that is small and has a bit of everything."""

    def __init__(self, dropout: float = 0.0, *, again: bool = False) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, 8), nn.LayerNorm(8)
        self.up, self.down, self.out = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, WORDS)
        self.dropout, self._again = nn.Dropout(dropout), again

    def block(self, x: Tensor) -> Tensor:
        """The part that may be computed again."""
        out: Tensor = self.norm(x + self.down(F.gelu(self.up(x))))
        return out

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits, or the loss where there are targets."""
        x = self.embed(tokens)
        x = checkpoint(self.block, x, use_reentrant=False) if self._again else self.block(x)
        logits: Tensor = self.out(self.dropout(x))
        return logits if targets is None else loss_of(logits, targets)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


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


def frozen(job: Job) -> None:
    """A part that is not trained, one that is not used, and gradients reduced by hand."""
    net = nn.ModuleDict({"words": Words(), "unused": nn.Linear(4, 4)})
    words = net["words"]
    words.get_submodule("embed").requires_grad_(requires_grad=False)
    is_reduced = isinstance(job.parallel(words), DistributedDataParallel)
    optimizer = torch.optim.NAdam(net.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        words(*job.words()).backward()
        for weight in net.parameters() if is_reduced else ():
            if weight.grad is not None:
                dist.all_reduce(weight.grad)
                weight.grad /= job.size
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


def pipelined(job: Job) -> None:
    """A model that torch's pipelining cuts into stages, of which each rank has one."""
    job.has_stages = True
    net = nn.Sequential(
        nn.Embedding(WORDS, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, WORDS)
    )
    if job.size > 1:
        for index in (range(2, 4), range(2))[job.rank]:
            net[index] = nn.Identity()
        stage = PipelineStage(net, job.rank, job.size, torch.device("cpu"))
        is_mean = job.fault != "sum"
        schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=loss_of, scale_grads=is_mean)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(STEPS):
        tokens, targets = job.words()
        optimizer.zero_grad()
        if job.size == 1:
            loss_of(net(tokens), targets).backward()
        elif job.rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=targets)
        optimizer.step()


SOUND: dict[str, Callable[[Job], None]] = {
    loop.__name__: loop
    for loop in (
        images,
        two_models,
        closure,
        many_evaluations,
        two_optimizers,
        accumulated,
        scaled,
        evaluated,
        frozen,
        doubled,
        recurrent,
    )
}
"""Those that compute what one process does."""
OTHER: dict[str, Callable[[Job], None]] = {
    loop.__name__: loop for loop in (batch_norm, dropout, pipelined)
}


def train(loop: Callable[[Job], None], fault: str = "") -> None:
    """Run a loop in this rank."""
    loop(Job(fault))
