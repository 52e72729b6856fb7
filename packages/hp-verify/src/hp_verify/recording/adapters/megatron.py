"""Megatron: optimizers of copies, whole or of a range of each parameter, and clipping by a norm."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.core.optimizer import optimizer as optimizers
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from hp_verify.recording.adapters import Held, Listener
from hp_verify.recording.calls import around
from hp_verify.recording.slices import Run


def held(root: nn.Module, named: Mapping[str, Tensor]) -> Iterator[Held]:
    """Yield float32 copies of whole parameters; ranges of them are told of by their optimizer."""
    del root
    for name, parameter in named.items():
        copy = getattr(parameter, "main_param", None)
        if copy is not None and copy.numel() == parameter.numel():
            yield copy, [Run(name, tuple(parameter.shape), 0, parameter.numel(), 0)]


def listen(listener: Listener) -> None:
    """Tell of the distributed optimizer's ranges, and of clipping."""
    around(
        DistributedOptimizer, "prepare_grads", before=lambda optimizer: _ranges(listener, optimizer)
    )
    around(
        optimizers,
        "clip_grad_by_total_norm_fp32",
        before=lambda parameters, max_norm, total_norm, **_: _before(  # noqa: ARG005
            listener, parameters, total_norm
        ),
    )


def _ranges(listener: Listener, optimizer: Any) -> None:
    for copied, copies in zip(
        optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True
    ):
        for parameter, copy in zip(copied, copies, strict=True):
            name = listener.name_of(parameter)
            if name is not None and copy is not None:
                span = optimizer._get_model_param_range_map(parameter)["param"]  # noqa: SLF001
                run = Run(name, tuple(parameter.shape), span.start, span.end - span.start, 0)
                listener.hold(copy, [run])


def _before(listener: Listener, parameters: Any, norm: Tensor | float) -> None:
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    listener.before_clipping((p, getattr(p, "decoupled_grad", p.grad)) for p in listed)
    listener.clipped(norm)
