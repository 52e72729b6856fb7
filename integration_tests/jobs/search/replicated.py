"""DDP, replicate and ZeroRedundancyOptimizer beside one process."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from integration_tests.jobs.search.cases import Case, Errors
from integration_tests.jobs.search.networks import (
    KINDS,
    Network,
    batch_of,
    differences,
    expected,
    gradients,
    loss_of,
    weights,
)


@dataclass(frozen=True)
class Setting:
    """How a network is replicated and trained.

    Attributes:
        kind: Kind of the network.
        options: Arguments of DDP.
        microbatches: Microbatches of a step.
        no_sync: Whether gradients of all but the last are left to it.
        hook: Communication hook.
        zero: Whether the optimizer's state is sharded.
        extra: What else is asked.
    """

    kind: str = "plain"
    options: dict[str, Any] = field(default_factory=dict)
    microbatches: int = 1
    no_sync: bool = False
    hook: str = ""
    zero: bool = False
    extra: str = ""


def cases() -> Iterator[Case]:
    """Return kinds x options x accumulation, hooks and optimizers."""
    options: tuple[dict[str, Any], ...] = (
        {},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"bucket_cap_mb": 1e-4},
    )
    for kind in KINDS:
        for some in options:
            yield _case(Setting(kind, some))
            yield _case(Setting(kind, some, 2, no_sync=True))
            yield _case(Setting(kind, some, 2))
        yield _case(Setting(kind, {"find_unused_parameters": True}, zero=True))
    for hook in ("allreduce", "fp16", "powerSGD"):
        for kind in ("plain", "unused", "uneven"):
            yield _case(Setting(kind, {"find_unused_parameters": True}, hook=hook))
    for extra in ("joined", "overlapped", "set-to-zero", "two-forwards", "mixed"):
        for kind in ("plain", "tied", "uneven"):
            yield _case(Setting(kind, extra=extra))
            yield _case(Setting(kind, {"gradient_as_bucket_view": True}, extra=extra))


def _case(setting: Setting) -> Case:
    told = [f"{name} {value}" for name, value in setting.options.items()]
    told += [f"{setting.microbatches} microbatches" if setting.microbatches > 1 else ""]
    told += ["no sync" if setting.no_sync else "", f"hook {setting.hook}" if setting.hook else ""]
    told += ["zero" if setting.zero else "", setting.extra]
    name = f"{setting.kind.replace(' ', '-')} {', '.join(filter(None, told))}"
    limit = {"fp16": 1e-2, "powerSGD": 1e9}.get(setting.hook, 1e-9)
    return Case(name, partial(_compared, setting), limit=limit)


def _make(setting: Setting, model: nn.Module) -> torch.optim.Optimizer:
    if setting.zero or setting.extra == "overlapped":
        return ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, lr=0.1, eps=1e-3, parameters_as_bucket_view=True
        )
    return torch.optim.AdamW(model.parameters(), 0.1, eps=1e-3)


def _compared(setting: Setting) -> Errors:
    torch.set_default_dtype(torch.float64)
    ranks = dist.get_world_size()
    model = DistributedDataParallel(Network(setting.kind), **setting.options)
    if setting.hook == "allreduce":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    elif setting.hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif setting.hook == "powerSGD":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook  # noqa: PLC0415

        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = _make(setting, model)
    seen = []
    for step in range(3):
        with Join([model]) if setting.extra == "joined" else nullcontext():
            for microbatch in range(setting.microbatches):
                is_last = microbatch == setting.microbatches - 1
                waits = setting.no_sync and not is_last
                with model.no_sync() if waits else nullcontext():
                    words = batch_of(step, microbatch, dist.get_rank())
                    loss = loss_of(model, words, microbatch)
                    if setting.extra == "two-forwards":
                        loss = (loss + loss_of(model, words, microbatch)) / 2
                    (loss / setting.microbatches).backward()
        seen.append(gradients(model))
        optimizer.step()
        seen.append(weights(model))
        optimizer.zero_grad(set_to_none=setting.extra != "set-to-zero")
    make = lambda plain: torch.optim.AdamW(plain.parameters(), 0.1, eps=1e-3)  # noqa: E731
    wanted = [*expected(setting.kind, ranks, setting.microbatches, 3, make)]
    return differences(seen, wanted)
