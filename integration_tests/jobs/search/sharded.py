"""FSDP2 and HSDP beside one process: units, meshes, accumulation, divisors, kinds of networks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

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
    """How a network is sharded and trained.

    Attributes:
        kind: Kind of the network.
        mesh: Sizes of the mesh; two: replicas and shards.
        units: Modules that are sharded: blocks, all at once, or blocks in pairs.
        reshard: Argument `reshard_after_forward`.
        accumulate: What waits for the last microbatch; empty: there is one.
        divisor: Argument of `set_gradient_divide_factor`, the losses being added up for it.
        summed: Whether reductions are forced to be sums.
        halves: Whether gradients are reduced as float16, with a larger limit.
        columns: Whether matrices are cut by columns.
        optimizer: Name of the optimizer and of its loop.
        extra: What else is asked.
    """

    kind: str = "plain"
    mesh: tuple[int, ...] = (2,)
    units: str = "blocks"
    reshard: bool | int | None = None
    accumulate: str = ""
    divisor: float = 0.0
    summed: bool = False
    halves: bool = False
    columns: bool = False
    optimizer: str = "SGD"
    extra: str = ""


_MESHES = {"2": (2,), "4": (4,), "2x2": (2, 2), "2x1": (2, 1), "1x2": (1, 2)}
_ACCUMULATE = ("reduced", "sync", "all-reduce", "last")
_EXTRAS = (
    "prefetch",
    "unused-too",
    "separate-group",
    "kept-unsharded",
    "no-unshard",
    "set-to-zero",
    "list",
)
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
    "AdamW-foreach": lambda m: torch.optim.AdamW(m.parameters(), 0.1, eps=1e-3, foreach=True),
    "AdamW-fused": lambda m: torch.optim.AdamW(m.parameters(), 0.1, eps=1e-3, fused=True),
    "AdamW-loop": lambda m: torch.optim.AdamW(m.parameters(), 0.1, eps=1e-3, foreach=False),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), 0.1),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), 0.1),
    "RAdam": lambda model: torch.optim.RAdam(model.parameters(), 0.1),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters(), 0.1),
    "Adamax": lambda model: torch.optim.Adamax(model.parameters(), 0.1),
    "ASGD": lambda model: torch.optim.ASGD(model.parameters(), 0.1),
    "Rprop": lambda model: torch.optim.Rprop(model.parameters(), 0.1),
    "Adadelta": lambda model: torch.optim.Adadelta(model.parameters(), 0.1),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), 0.1, centered=True),
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters(), 0.1),
}


def cases() -> Iterator[Case]:
    """Return settings: kinds x meshes x accumulation, and each other option by itself."""
    for kind in KINDS:
        for mesh in ("2", "2x2"):
            for accumulate in ("", *_ACCUMULATE):
                yield _case(Setting(kind, _MESHES[mesh], accumulate=accumulate))
        yield _case(Setting(kind, units="root"))
        yield _case(Setting(kind, units="root", accumulate="sync"))
        yield _case(Setting(kind, units="pairs", accumulate="reduced"))
        yield _case(Setting(kind, reshard=False, accumulate="reduced"))
        yield _case(Setting(kind, (2, 1), accumulate="all-reduce"))
    plain = Setting()
    for sizes in _MESHES.values():
        for reshard in (True, False, 2):
            yield _case(replace(plain, mesh=sizes, reshard=reshard))
        for divisor, summed, halves in (
            (1.0, False, False),
            (2.0, False, False),
            (4.0, False, False),
            (3.0, False, False),
            (2.0, True, False),
            (3.0, True, False),
            (0.0, True, False),
            (2.0, False, True),
            (0.0, False, True),
        ):
            yield _case(replace(plain, mesh=sizes, divisor=divisor, summed=summed, halves=halves))
        yield _case(replace(plain, mesh=sizes, columns=True))
    yield _case(replace(plain, mesh=(1,), divisor=2.0))
    yield _case(replace(plain, mesh=(1,), divisor=2.0, summed=True))
    yield _case(replace(plain, mesh=(1,), divisor=2.0, halves=True))
    for optimizer in OPTIMIZERS:
        for kind in ("plain", "uneven"):
            yield _case(Setting(kind, optimizer=optimizer))
        yield _case(Setting(mesh=(2, 2), optimizer=optimizer))
    for extra in _EXTRAS:
        yield _case(replace(plain, extra=extra))
        yield _case(Setting("experts in turn", extra=extra, accumulate="sync"))


def _case(setting: Setting) -> Case:
    mesh = "x".join(map(str, setting.mesh))
    told = [f"mesh {mesh}", setting.units, f"reshard {setting.reshard}", setting.accumulate]
    told += [setting.optimizer, setting.extra, "columns" if setting.columns else ""]
    told += [f"divisor {setting.divisor:g}" if setting.divisor else ""]
    told += ["summed" if setting.summed else "", "float16" if setting.halves else ""]
    name = f"{setting.kind.replace(' ', '-')} {', '.join(filter(None, told))}"
    size = 1
    for each in setting.mesh:
        size *= each
    return Case(name, partial(_compared, setting), size, 1e-2 if setting.halves else 1e-9)


def _compared(setting: Setting) -> Errors:
    """Train two steps under FSDP2 and in one process."""
    torch.set_default_dtype(torch.float64)
    ranks, microbatches = dist.get_world_size(), 2 if setting.accumulate else 1
    model = _sharded(setting)
    optimizer = OPTIMIZERS[setting.optimizer](model)
    # Losses that are added up, where a divisor makes a mean of them.
    scale = setting.divisor / ranks if setting.divisor else 1.0
    seen = []
    for step in range(2):
        for microbatch in range(microbatches):
            _set_sync(model, setting.accumulate, is_last=microbatch == microbatches - 1)
            words = batch_of(step, microbatch, dist.get_rank())
            (loss_of(model, words, microbatch) * scale / microbatches).backward()
        if setting.extra == "kept-unsharded":
            for unit in _units(model):
                unit.reshard()
        seen.append(gradients(model))
        optimizer.step()
        seen.append(weights(model))
        optimizer.zero_grad(set_to_none=setting.extra != "set-to-zero")
    make = OPTIMIZERS[setting.optimizer]
    return differences(seen, [*expected(setting.kind, ranks, microbatches, 2, make)])


def _sharded(setting: Setting) -> Network:
    """Return a network that is sharded as asked."""
    names = ("replicas", "shards")[-len(setting.mesh) :]
    mesh = init_device_mesh("cpu", setting.mesh, mesh_dim_names=names)
    model = Network(setting.kind)
    how: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": setting.reshard}
    if setting.columns:
        how["shard_placement_fn"] = lambda p: Shard(1) if p.ndim > 1 else Shard(0)
    if setting.halves:
        how["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    blocks = [*dict.fromkeys(model.blocks)]
    if setting.units == "blocks":
        for block in blocks:
            fully_shard(block, **how)
    elif setting.units == "pairs":
        fully_shard(blocks[:2], **how)
    if setting.extra == "list":
        fully_shard([model.table, model.head], **how)
    fully_shard(model, **how)
    units = _units(model)
    for unit in units:
        if setting.divisor:
            unit.set_gradient_divide_factor(setting.divisor)
        if setting.summed:
            unit.set_force_sum_reduction_for_comms(enable=True)
    _set_extra(units, setting.extra)
    return model


def _units(model: nn.Module) -> list[FSDPModule]:
    return [each for each in model.modules() if isinstance(each, FSDPModule)]


def _set_extra(units: Sequence[FSDPModule], extra: str) -> None:
    root, *blocks = units
    if extra == "prefetch":
        blocks[0].set_modules_to_forward_prefetch(blocks[1:])
        blocks[-1].set_modules_to_backward_prefetch(blocks[:-1])
    elif extra == "unused-too":
        root.set_reduce_scatter_unused_params(True)
    elif extra == "separate-group":
        root.set_separate_reduce_scatter_group(True)
    elif extra == "kept-unsharded":
        root.set_reshard_after_backward(False)
        root.set_reshard_after_forward(False)
    elif extra == "no-unshard":
        blocks[0].set_unshard_in_backward(False)


def _set_sync(model: Network, accumulate: str, *, is_last: bool) -> None:
    assert isinstance(model, FSDPModule)
    if accumulate == "sync":
        model.set_requires_gradient_sync(is_last)
    elif accumulate == "all-reduce":
        model.set_requires_all_reduce(is_last)
    elif accumulate == "last":
        model.set_is_last_backward(is_last)
