"""A job that is stopped and resumes, in plain torch, and what a resume may lose."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

VOCABULARY, WIDTH, LENGTH, BATCH = 30, 8, 6, 4
LOST = (
    "moments",
    "updates",  # as Adam's bias correction counts them
    "rate",
    "data",
    "random",
    "weights",
    "buffers",
)


def build() -> nn.Sequential:
    """A model with dropout, and with buffers that training moves."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.BatchNorm1d(LENGTH),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(2 * WIDTH, VOCABULARY),
    )


def train(path: Path, *, first: int, last: int, lost: str = "") -> None:
    """Train from one step to another, and save.

    Args:
        path: File of the checkpoint; loaded unless this is the beginning.
        first: Steps that were trained before.
        last: Steps that are trained then.
        lost: What a resume does not load, one of `LOST`.
    """
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    data = torch.Generator().manual_seed(3)
    if first:
        _load(torch.load(path), model, optimizer, schedule, data, lost)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    net: nn.Module = nn.parallel.DistributedDataParallel(model) if size > 1 else model
    held_out = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % VOCABULARY
    for _ in range(first, last):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=data)[rank::size]
        logits = net(tokens[:, :-1])
        loss: Tensor = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        net.eval()
        with torch.no_grad():
            net(held_out)
        net.train()
    if rank == 0:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
            "data": data.get_state(),
            "random": torch.get_rng_state(),
        }
        torch.save(state, path)


def _load(  # noqa: PLR0917
    state: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LambdaLR,
    data: torch.Generator,
    lost: str,
) -> None:
    buffers = {name for name, _ in model.named_buffers()}
    weights = {
        name: value
        for name, value in state["model"].items()
        if lost != ("buffers" if name in buffers else "weights")
    }
    model.load_state_dict(weights, strict=False)
    for each in state["optimizer"]["state"].values():
        if lost == "updates":
            each["step"].zero_()
        if lost == "moments":
            each["exp_avg"].zero_()
    optimizer.load_state_dict(state["optimizer"])
    if lost != "rate":
        schedule.load_state_dict(state["schedule"])
    else:
        optimizer.param_groups[0]["lr"] = 1e-2
    if lost != "data":
        data.set_state(state["data"])
    if lost != "random":
        torch.set_rng_state(state["random"])


if __name__ == "__main__":
    file, begin, end, *rest = sys.argv[1:]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    train(Path(file), first=int(begin), last=int(end), lost="".join(rest))
