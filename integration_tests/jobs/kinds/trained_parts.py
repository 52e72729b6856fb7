"""Training loops of which some parameters are not trained, later or otherwise."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from integration_tests.jobs.kinds.job import STEPS, Job, Words, average, gradients


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


def thawed(job: Job) -> None:
    """Layers are trained from the second step on, in a group of their own.

    The mistake: one rank thaws them a step late.
    """
    net = Words()
    late = int(bool(job.fault) and job.rank == 1)
    job.fault = ""
    net.embed.requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for step in range(STEPS + 1):
        if step == 1:
            optimizer.add_param_group({"params": [*net.embed.parameters()], "lr": 0.05})
        net.embed.requires_grad_(requires_grad=step >= 1 + late)
        net(*job.words()).backward()
        for weight in net.parameters():
            held = torch.zeros_like(weight) if weight.grad is None else weight.grad
            average(job, [held])
        optimizer.step()
        optimizer.zero_grad()


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


def grown(job: Job) -> None:
    """More words after the first step, with an optimizer of their own.

    The mistake: each rank makes up its own.
    """
    net = Words()
    is_wrong = bool(job.fault) and job.rank == 1
    job.fault = ""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(STEPS + 1):
        if step == 1:
            rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(9 + is_wrong))
            net.embed.weight = nn.Parameter(torch.cat([net.embed.weight.detach(), rows]))
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        tokens, targets = job.words()
        optimizer.zero_grad()
        net(tokens + (4 if step else 0), targets).backward()
        average(job, gradients(net))
        optimizer.step()
