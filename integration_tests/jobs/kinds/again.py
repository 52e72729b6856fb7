"""Training loops whose activations are computed again, or put away, for the backward."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from integration_tests.jobs.kinds.job import STEPS, Job, Words, loss_of, trained


def whole_again(job: Job) -> None:
    """A model that is computed again as a whole, the old way: without gradients at first."""
    net = Words()

    def loss() -> Tensor:
        tokens, targets = job.words()
        wanted = torch.zeros(1, requires_grad=True)
        logits = checkpoint(lambda _, x: net(x), wanted, tokens, use_reentrant=True)
        return loss_of(logits, targets)

    trained(job, net.parameters(), loss)


class Again(Words):
    """Its block is computed again, the old way."""

    def block(self, x: Tensor) -> Tensor:
        """Without gradients at first."""
        out: Tensor = checkpoint(super().block, x, use_reentrant=True)
        return out


def blocks_again(job: Job) -> None:
    """Blocks that are computed again the old way, beside DDP; the mistake: one gradient is late."""
    net = Again()
    is_wrong = bool(job.fault)
    job.fault = ""
    model = job.parallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(*job.words()).backward()
        if is_wrong and job.rank:
            net.up.weight.grad = torch.zeros_like(net.up.weight)
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


def packed_away(job: Job) -> None:
    """Saved tensors are put away until the backward; the mistake: a rank gets them back rounded."""
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
