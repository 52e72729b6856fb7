"""DeepSpeed: a group's parameters lie end to end, of which ZeRO gives each rank a part."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from deepspeed.runtime import engine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from hp_verify.recording.adapters import Held, Listener
from hp_verify.recording.calls import around
from hp_verify.recording.slices import Run


def held(root: nn.Module, named: Mapping[str, Tensor]) -> Iterator[Held]:
    """Yield parts of parameters (ZeRO-3), and of their copies that the optimizer has."""
    zero = getattr(root, "optimizer", None)
    is_in_turn = getattr(zero, "round_robin_gradients", False)
    if is_in_turn:
        yield from _held_in_turn(zero, {id(p): name for name, p in named.items()})
    groups: dict[int, list[Run]] = defaultdict(list)
    tensors: dict[int, Tensor] = {}
    for name, parameter in named.items():
        described: Any = parameter
        mapping = getattr(parameter, "_hp_mapping", None)
        if hasattr(parameter, "ds_tensor"):
            whole = tuple(described.ds_shape)
            part = described.ds_tensor
            first = part.ds_numel * torch.distributed.get_rank(described.ds_process_group)
            size = max(0, min(part.ds_numel, described.ds_numel - first))
            if size:
                yield part, [Run(name, whole, first, size, 0)]
            optimizer = getattr(parameter, "_z3_optimizer", None)
            if size and optimizer is not None:
                group, at, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
                tensors[group] = optimizer.fp32_partitioned_groups_flat[group]
                groups[group].append(Run(name, whole, first, size, int(at)))
        elif mapping is not None and not is_in_turn:
            here = mapping.lp_fragment_address
            run = Run(name, tuple(parameter.shape), here.start, here.numel, 0)
            yield mapping.hp_fragment, [run]
    for group, runs in groups.items():
        yield tensors[group], runs


def _held_in_turn(optimizer: Any, names: Mapping[int, str]) -> Iterator[Held]:
    """Yield copies where gradients are parted in turn: DeepSpeed maps them to other parameters."""
    for index, group in enumerate(optimizer.round_robin_bit16_groups):
        rank = torch.distributed.get_rank(optimizer.real_dp_process_group[index])
        size = optimizer.partition_size[index]
        begin, runs = rank * size, []
        for parameter, at in zip(group, optimizer.round_robin_bit16_offsets[index], strict=True):
            first, last = max(at, begin), min(at + parameter.numel(), begin + size)
            if last > first and id(parameter) in names:
                shape = tuple(parameter.shape)
                runs.append(
                    Run(names[id(parameter)], shape, first - at, last - first, first - begin)
                )
        yield optimizer.single_partition_of_fp32_groups[index], runs


def listen(listener: Listener) -> None:
    """Tell of each stage's own clipping."""
    around(
        DeepSpeedZeroOptimizer,
        "unscale_and_clip_grads",
        before=lambda optimizer, grad_groups_flat, total_norm: _of_groups(
            listener, optimizer, grad_groups_flat, total_norm
        ),
    )
    around(
        DeepSpeedZeroOptimizer_Stage3,
        "unscale_and_clip_grads",
        before=lambda optimizer, sub_group_id, total_norm: _of_stage_3(
            listener, optimizer, sub_group_id, total_norm
        ),
    )
    around(
        engine,
        "clip_grad_norm_",
        before=lambda parameters, *_, **__: listener.before_clipping(
            (p, p.grad) for p in parameters
        ),
        after=listener.clipped,
    )


def _of_groups(listener: Listener, optimizer: Any, gradients: list[Tensor], norm: Any) -> None:
    parts = optimizer.single_partition_of_fp32_groups
    which = [part for part in parts if any(part.grad is gradient for gradient in gradients)]
    _tell(listener, optimizer, which, norm, is_first=bool(which) and which[0] is parts[0])


def _of_stage_3(listener: Listener, optimizer: Any, group: int, norm: Any) -> None:
    part = optimizer.fp32_partitioned_groups_flat[group]
    _tell(listener, optimizer, [part], norm, is_first=group == 0)


def _tell(
    listener: Listener, optimizer: Any, parts: list[Tensor], norm: Any, *, is_first: bool
) -> None:
    """Tell of gradients as they are before they are divided by the scale of the loss."""
    scale = optimizer.loss_scale
    gradients = ((p, None if p.grad is None else p.grad / scale) for p in parts)
    if optimizer.clip_grad > 0.0:
        listener.before_clipping(gradients)
        if is_first:
            listener.clipped(norm / scale)
