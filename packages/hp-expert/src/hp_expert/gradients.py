"""The norm of all gradients of a model whose parameters are spread over ranks, and clipping by it.

`torch.nn.utils.clip_grad_norm_` cannot stack norms of DTensors on different meshes, and takes an
expert's plain local tensor for the whole parameter. Here the groups over which a parameter is
sharded are known: of a `DTensor` from its placements, of a plain tensor of experts from the style
that has spread them.

Beside data parallelism, a wrapper may average gradients where experts sum them.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from hp_expert.styles.sharding import shard_dim
from hp_platform import float64_norms, resolve_group

Groups = tuple[ProcessGroup, ...]


def shard_groups(module: nn.Module) -> dict[Tensor, Groups]:
    """Return the groups over which the plain parameters of a module's experts are sharded.

    A parameter that is a `DTensor` is not listed: its placements say how it is sharded.
    """
    found: dict[Tensor, Groups] = {}
    for experts in module.modules():
        if not isinstance(experts, SpreadExperts) or experts.ranks is None:
            continue
        ranks = experts.ranks
        for name, parameter in experts.named_parameters(recurse=False):
            if ranks.mesh is not None and isinstance(parameter, DTensor):
                continue
            groups = []
            if ranks.tp is not None and shard_dim(name, "tp") is not None:
                groups.append(ranks.tp)
            # A user's own style may leave all experts on every rank.
            if ranks.ep is not None and parameter.shape[0] < experts.total_experts:
                groups.append(ranks.ep)
            found[parameter] = tuple(groups)
    return found


@torch.no_grad()
def grad_norm(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    *,
    norm_type: float = 2.0,
    sharded: Mapping[Tensor, Sequence[ProcessGroup]] | None = None,
    across: ProcessGroup | None = None,
) -> Tensor:
    """Return the norm of the gradients of all ranks' parameters, the same bits on every rank.

    All ranks call it together, with parameters in the same order. A parameter without a gradient
    adds nothing.

    Args:
        parameters: A module or parameters, any mixture of plain tensors and DTensors on any
            meshes. For a module, the groups of its experts are found by `shard_groups`.
        norm_type: p of the p-norm, positive; `math.inf` for the largest absolute value.
        sharded: Groups over which plain parameters are sharded, where `parameters` is not a
            module: `shard_groups(model)`, or your own.
        across: Ranks that have other parameters, such as the stages of a pipeline.

    Returns:
        fp64 [], on the device of the first parameter.

    Raises:
        ValueError: If `norm_type` is not positive.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type ({norm_type}) must be positive")
    listed = _listed(parameters)
    device = local_part(listed[0]).device if listed else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    by_tensor = shard_groups(parameters) if isinstance(parameters, nn.Module) else {}
    by_tensor |= {tensor: tuple(groups) for tensor, groups in (sharded or {}).items()}
    for (_, groups), tensors in _by_groups(listed, by_tensor).items():
        power = _power([g for g in map(_gradient, tensors) if g is not None], norm_type, tensors[0])
        for group in groups:
            power = _over(power, group, norm_type)
        total = _merge(torch.stack([total, power.to(device)]), norm_type)
    if across is not None:
        total = _over(total, across, norm_type)
    return total if math.isinf(norm_type) else total.pow(1 / norm_type)


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    sharded: Mapping[Tensor, Sequence[ProcessGroup]] | None = None,
    across: ProcessGroup | None = None,
    foreach: bool | None = None,
) -> Tensor:
    """Scale all gradients, in place, so that their norm over all ranks is at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_`, including the 1e-6 that it adds to the norm; see
    `grad_norm` for the parameters. The host reads no value unless `error_if_nonfinite`.

    Args:
        parameters: See `grad_norm`.
        max_norm: Largest norm for which gradients stay as they are.
        norm_type: See `grad_norm`.
        error_if_nonfinite: Raise, on every rank, instead of scaling by a norm that is not finite.
        sharded: See `grad_norm`.
        across: See `grad_norm`.
        foreach: Whether to scale many gradients in one kernel; None: where that is faster.

    Returns:
        The norm before, fp64 [].

    Raises:
        RuntimeError: If the norm is not finite and `error_if_nonfinite`.
    """
    parameters = parameters if isinstance(parameters, nn.Module) else _listed(parameters)
    norm = grad_norm(parameters, norm_type=norm_type, sharded=sharded, across=across)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(f"norm of gradients ({norm.item()}) must be finite")
    gradients = [p.grad for p in _listed(parameters) if p.grad is not None]
    holders = []
    for gradient in map(local_part, gradients):
        # torch scales the gradients of tensors, and only plain tensors many at a time.
        holders.append(gradient.detach())
        holders[-1].grad = gradient
    nn.utils.clip_grads_with_norm_(holders, max_norm, norm, foreach=foreach)
    return norm


def _listed(parameters: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(parameters, Tensor):
        return [parameters]
    return list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)


def _by_groups(
    parameters: Sequence[Tensor], sharded: Mapping[Tensor, Groups]
) -> dict[tuple[torch.device, Groups], list[Tensor]]:
    """Group parameters by device and by the groups that shard them, in one order on all ranks."""
    found: dict[tuple[torch.device, Groups], list[Tensor]] = {}
    for parameter in parameters:
        groups = (*sharded.get(parameter, ()), *_groups_of(parameter))
        groups = tuple(group for group in groups if group.size() > 1)
        found.setdefault((local_part(parameter).device, groups), []).append(parameter)
    return found


def _groups_of(parameter: Tensor) -> Groups:
    if not isinstance(parameter, DTensor):
        return ()
    mesh, placements = parameter.device_mesh, parameter.placements
    return tuple(mesh.get_group(a) for a, p in enumerate(placements) if not p.is_replicate())


def _gradient(parameter: Tensor) -> Tensor | None:
    """Return the local part of a gradient, sharded as its parameter: it may be a partial sum."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return None if gradient is None else local_part(gradient)


def _power(gradients: list[Tensor], norm_type: float, like: Tensor) -> Tensor:
    """Return the sum of |g|^p, or the largest |g|, fp64 []."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=local_part(like).device)
    stacked = torch.stack(float64_norms(gradients, norm_type))
    return _merge(stacked if math.isinf(norm_type) else stacked.pow(norm_type), norm_type)


def _merge(powers: Tensor, norm_type: float) -> Tensor:
    return powers.amax() if math.isinf(norm_type) else powers.sum()


def _over(power: Tensor, group: ProcessGroup, norm_type: float) -> Tensor:
    """Merge the powers of ranks, in rank order.

    Powers are summed in fp64, in the order of the parameters. Powers of ranks are gathered and
    summed in rank order instead of being reduced, so that every rank gets the same bits whatever
    algorithm a collective uses. Every rank counts a replicated parameter once, on its own.
    """
    everyone = [torch.empty_like(power) for _ in range(group.size())]
    dist.all_gather(everyone, power, group=group)
    return _merge(torch.stack(everyone), norm_type)


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
                buckets.setdefault(parameter.dtype, []).append(_present(parameter))
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


def _present(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local_part(parameter.grad)
