"""FSDP1: a unit's parameters lie end to end in a `FlatParameter`, of which a rank has a shard."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from hp_verify.recording.adapters import Held, Listener
from hp_verify.recording.calls import around
from hp_verify.recording.names import plain
from hp_verify.recording.slices import Run


def held(root: nn.Module, named: Mapping[str, Tensor]) -> Iterator[Held]:
    """Yield shards, or the views of them that take the parameters' places."""
    del named
    for place, module in root.named_modules():
        handle = getattr(module, "_handle", None)
        if not isinstance(module, FullyShardedDataParallel) or handle is None:
            continue
        flat = handle.flat_param
        runs = list(_runs(place, flat))
        if flat._params is None:  # noqa: SLF001
            yield flat, [run for run in runs if run.size]
            continue
        for parameter, run in zip(flat._params, runs, strict=True):  # noqa: SLF001
            if run.size:
                yield parameter, [Run(run.name, run.shape, run.first, run.size, 0)]


def _runs(place: str, flat: Any) -> Iterator[Run]:
    described = zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True)  # noqa: SLF001
    for name, shape, info in described:
        size = info.numel_in_shard if info.in_shard else 0
        first, at = (info.intra_param_start_idx, info.offset_in_shard) if size else (0, 0)
        yield Run(plain(f"{place}.{name}" if place else name), tuple(shape), first, size, at)


def listen(listener: Listener) -> None:
    """Tell of the clipping that is a method of the model."""
    around(
        FullyShardedDataParallel,
        "clip_grad_norm_",
        before=lambda model, *_, **__: listener.before_clipping(
            (p, p.grad) for p in model.parameters()
        ),
        after=listener.clipped,
    )
