"""Experts beside data parallelism whose wrapper averages gradients instead of summing them.

Note [Scale of gradients]. The gradient of an expert is the sum over the tokens of all ranks of its
expert-parallel group. The ranks that hold the same expert are its replicas; their gradients have
yet to be summed. A loss that is a sum over tokens, divided by the number of tokens of all ranks,
needs only that sum. A wrapper that averages, because the loss of each rank is a mean over its own
tokens, divides other gradients by the number of data-parallel ranks. Gradients of experts must be
divided by that same number, which is not the number of replicas, but replicas times expert-parallel
ranks. Tensor-parallel ranks share tokens and are not counted.

Note [Sums, scaled apart]. By default FSDP2 has NCCL divide while it sums: by AVG, or by PREMUL_SUM
for any other factor, 1 included. NCCL does neither without copies or in the switch (NVLS),
PREMUL_SUM of bf16 has given gradients of zero (pytorch #190745), and Gloo has neither. So FSDP2 is
told to sum only, and divides the sums. Over one rank nothing is summed, and FSDP2 divides while it
copies; told to sum only, it would divide again, also with HSDP, where it sums the copies by SUM in
any case.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from hp_expert.experts.module import SpreadExperts
from hp_expert.placement import local_part
from hp_platform import resolve_group


def fully_shard_experts(
    module: nn.Module, mesh: DeviceMesh, *, divide_gradients_by: float, **options: Any
) -> nn.Module:
    """Apply FSDP2 to the experts of a module, over their replicas, with gradients to scale.

    Ranks only ever sum; see Note [Sums, scaled apart].

    Call it after a style and before `fully_shard` of the modules around the experts. Parameters
    that a style made DTensors must be on another axis of the same root mesh.

    Args:
        module: `GroupedExperts`, a module that contains some, or a model that
            `apply_to_transformers` has spread.
        mesh: The replicas: one axis, as of `init_device_mesh(..., ("efsdp", "ep"))["efsdp"]`, over
            which parameters are sharded; or two (HSDP), the first of ranks that keep copies.
        divide_gradients_by: 1 if the loss is divided by the tokens of all ranks; the number of
            data-parallel ranks, `efsdp * ep`, if it is a mean over those of this rank. See Note
            [Scale of gradients].
        **options: Further options of `torch.distributed.fsdp.fully_shard`.

    Returns:
        `module`.

    Raises:
        ValueError: If the mesh has more than two axes.
    """
    if mesh.ndim > 2:
        raise ValueError(f"mesh must have one or two axes, not {mesh.mesh_dim_names}")
    group, num_shards = mesh.get_group(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    place = partial(_fsdp_placement, num_shards=num_shards)
    for experts in _experts_of(module):
        factor, dtype = divide_gradients_by, next(experts.parameters(recurse=False)).dtype
        alone = DeviceMesh.from_group(group, mesh.device_type) if num_shards == 1 else None
        if alone is not None and _divides_twice(alone, dtype, options.get("mp_policy")):
            factor = math.sqrt(factor)
        fully_shard(experts, mesh=mesh, **({"shard_placement_fn": place} | options))
        assert isinstance(experts, FSDPModule)
        experts.set_gradient_divide_factor(factor)
        experts.set_force_sum_reduction_for_comms(num_shards > 1)
    return module


def expert_parameter_names(module: nn.Module) -> list[str]:
    """Return the names of a module's expert parameters, for wrappers that must not reduce them."""
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        if isinstance(part, SpreadExperts)
        for name, _ in part.named_parameters(recurse=False)
    ]


@torch.no_grad()
def reduce_expert_gradients(
    module: nn.Module, *, replicas: ProcessGroup | DeviceMesh, divide_by: float = 1.0
) -> None:
    """Sum the gradients of experts over the ranks that hold the same ones, and divide them.

    For data parallelism that does not reduce experts. All replicas call it after backward. A
    missing gradient counts as zero.

    Args:
        module: Module that contains the experts.
        replicas: The ranks that hold the same experts, this one included.
        divide_by: The number of data-parallel ranks if the wrapper of the other parameters
            averages; see Note [Scale of gradients].
    """
    group = resolve_group(replicas)
    buckets: dict[torch.dtype, list[Tensor]] = {}
    for experts in _experts_of(module):
        for parameter in experts.parameters(recurse=False):
            if parameter.requires_grad:
                buckets.setdefault(parameter.dtype, []).append(_gradient(parameter))
    for gradients in buckets.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=group)
        flat /= divide_by
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def _experts_of(module: nn.Module) -> Iterator[nn.Module]:
    return (part for part in list(module.modules()) if isinstance(part, SpreadExperts))


def _fsdp_placement(parameter: nn.Parameter, *, num_shards: int) -> Shard | None:
    """Shard along the experts, or inside each expert where there are fewer experts than shards."""
    num_local_experts, width = local_part(parameter).shape[:2]
    cuts_inside = num_local_experts < num_shards and width % num_shards == 0
    return Shard(1) if cuts_inside else None


@torch.enable_grad()
def _divides_twice(
    mesh: DeviceMesh, dtype: torch.dtype, policy: MixedPrecisionPolicy | None
) -> bool:
    """Tell whether FSDP2 applies a factor twice over one rank, as torch 2.13 does in fp16 and fp64.

    Other versions may differ, so a small module is asked; over one rank that is cheap.
    """
    probe = nn.Linear(1, 1, bias=False, device=mesh.device_type, dtype=dtype)
    fully_shard(probe, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    assert isinstance(probe, FSDPModule)
    probe.set_gradient_divide_factor(4.0)
    probe(torch.ones(1, 1, device=mesh.device_type, dtype=dtype)).sum().backward()
    assert isinstance(probe.weight.grad, DTensor)
    return probe.weight.grad.to_local().item() < 1 / 8


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local_part(parameter.grad)
