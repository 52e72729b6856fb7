"""Parts of training loops of all kinds: the job, a small model, its loss, averages over ranks."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

STEPS = 2
WORDS = 20


class Job:
    """Rank, data and fault that a loop is given.

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


def average(job: Job, tensors: Iterable[Tensor]) -> None:
    """Average over ranks, in place."""
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor.div_(job.size)


def gradients(net: nn.Module) -> list[Tensor]:
    """Return the gradients that a model has."""
    return [p.grad for p in net.parameters() if p.grad is not None]


def reduced(job: Job, parameters: Iterable[Tensor]) -> None:
    """Average gradients by hand."""
    for parameter in parameters if job.size > 1 and job.fault != "no-sync" else ():
        if parameter.grad is not None:
            held = parameter.grad
            dist.all_reduce(torch.view_as_real(held) if held.is_complex() else held)
            held /= job.size


def summed(job: Job, net: nn.Module) -> None:
    """Add up gradients by hand; those of the table alone are not, where that is the fault."""
    fault, weights = job.fault, list(net.parameters())
    for weight in weights[1:] if fault == "no-sync" else weights:
        if weight.grad is not None:
            dist.all_reduce(weight.grad)


Loss = Callable[[], Tensor]


def trained(job: Job, parameters: Iterable[Tensor], loss: Loss) -> None:
    """Update with AdamW after gradients were averaged by hand."""
    weights = list(parameters)
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss().backward()
        reduced(job, weights)
        optimizer.step()


def train(loop: Callable[[Job], None], fault: str = "") -> None:
    """Run a loop in this rank."""
    loop(Job(fault))


def by_name(*loops: Callable[[Job], None]) -> dict[str, Callable[[Job], None]]:
    """Return loops by their names, which are those of test cases."""
    return {loop.__name__: loop for loop in loops}
