"""Balancing without a loss: a bias on the scores that changes only the choice of experts.

After each optimizer step, the bias of experts with fewer tokens than the mean is raised, and that
of other experts lowered ("Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts",
arXiv:2408.15664).

Shape symbols: E experts.
"""

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hp_expert.routing.load import take
from hp_expert.routing.router import TopKRouter
from hp_platform import resolve_group

UpdateRule = Literal["sign", "error"]


@torch.no_grad()
def take_loads(
    module: nn.Module, *, group: ProcessGroup | DeviceMesh | None = None
) -> dict[str, Tensor]:
    """Return the loads that the routers of a module have counted, over all ranks; reset them.

    The host reads nothing.

    Args:
        module: Module that contains TopKRouters, the same on all ranks.
        group: Ranks with their own tokens: data, expert and context parallel ranks, without
            tensor-parallel ranks, which have the same tokens. The loads of all routers are summed
            together. None: this rank alone.

    Returns:
        Slots of each expert by name of the router, int64 [E].
    """
    routers = _routers(module)
    if not routers:
        return {}
    loads = torch.cat([take(router.load) for router in routers.values()])
    if group is not None:
        dist.all_reduce(loads, group=resolve_group(group))
    sizes = [router.num_experts for router in routers.values()]
    return dict(zip(routers, loads.split(sizes), strict=True))


@torch.no_grad()
def update_correction_biases(
    module: nn.Module,
    *,
    rate: float = 1e-3,
    rule: UpdateRule = "sign",
    group: ProcessGroup | DeviceMesh | None = None,
) -> dict[str, Tensor]:
    """Move the correction biases of a module's routers towards equal load, and reset the loads.

    To be called once per optimizer step, whatever the number of microbatches. The biases have the
    same bits on all ranks: loads are whole numbers, whose sum does not depend on the order.

    Args:
        module: Module that contains TopKRouters, the same on all ranks; of those without a
            correction bias only the loads are returned.
        rate: Learning rate of the biases: bias += rate * step.
        rule: Step of a bias: "sign" of mean - load, or "error", (mean - load) / mean. The second is
            the paper's variant without the sign, here divided by the mean, so that a rate does not
            depend on the number of tokens.
        group: See `take_loads`.

    Returns:
        The loads as of `take_loads`, for `load_imbalance`.

    Raises:
        ValueError: If the rate is negative, the rule unknown, or a bias narrower than fp32.
    """
    _check(module, rate, rule)
    loads = take_loads(module, group=group)
    routers = _routers(module)
    for name, load in loads.items():
        bias = routers[name].correction_bias
        if bias is not None:
            bias.add_(_step(load, rule).to(bias.dtype), alpha=rate)
    return loads


def register_correction_bias_update(
    optimizer: Optimizer,
    module: nn.Module,
    *,
    rate: float = 1e-3,
    rule: UpdateRule = "sign",
    group: ProcessGroup | DeviceMesh | None = None,
) -> RemovableHandle:
    """Call `update_correction_biases` after every step of an optimizer.

    If several optimizers train a module, register with one of them. A step that a gradient scaler
    skips updates nothing: its loads are part of the next step.

    Returns:
        A handle with a method `remove` that ends the updates.
    """
    _check(module, rate, rule)

    def update(*_: object) -> None:
        update_correction_biases(module, rate=rate, rule=rule, group=group)

    return optimizer.register_step_post_hook(update)


def load_imbalance(load: Tensor) -> Tensor:
    """Return the largest load divided by the mean: 1 for equal use, 0 if nothing was counted.

    One more than the maximal violation of arXiv:2408.15664 (MaxVio).

    Args:
        load: Slots of each expert, integer [..., E].

    Returns:
        fp32 [...], on the device of the load.
    """
    mean = load.to(torch.float32).mean(dim=-1)
    return load.amax(dim=-1) / mean.clamp_min(torch.finfo(torch.float32).tiny)


def _step(load: Tensor, rule: UpdateRule) -> Tensor:
    """Return the step of the bias at rate 1, [E]; a sign is exact."""
    excess = load * load.numel() - load.sum()
    return -excess.sign() if rule == "sign" else -excess / load.sum().clamp_min(1)


def _routers(module: nn.Module) -> dict[str, TopKRouter]:
    return {n: part for n, part in module.named_modules() if isinstance(part, TopKRouter)}


def _check(module: nn.Module, rate: float, rule: str) -> None:
    if not rate >= 0:
        raise ValueError(f"rate ({rate}) must not be negative")
    if rule not in ("sign", "error"):
        raise ValueError(f"rule ({rule}) must be sign or error")
    for name, router in _routers(module).items():
        bias = router.correction_bias
        if bias is not None and torch.promote_types(bias.dtype, torch.float32) != bias.dtype:
            raise ValueError(f"correction_bias of {name} ({bias.dtype}) must be fp32 or wider")
