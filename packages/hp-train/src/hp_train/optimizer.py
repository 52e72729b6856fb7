"""AdamW, its learning-rate schedule, and the one gradient norm of the whole model.

Note [gradient norm]: the norm is summed in fp64 over (parameter name, expert) entries in one
fixed order. Each entry is computed by exactly one rank and is zero on all others, so the
all-reduce adds nothing but zeros to it and the result does not depend on the layout beyond the
rounding of the gradients themselves.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hp_expert import GroupedExperts
from hp_train.config import TrainConfig
from hp_train.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of this rank, known by its name in the whole model.

    Attributes:
        name: Global name.
        tensor: The local values: all of it, or the local experts' slices along dim 0.
        experts: Global indices of the local experts; None where the parameter is whole.
    """

    name: str
    tensor: nn.Parameter
    experts: range | None = None


def named_parameters(stages: Iterable[nn.Module]) -> list[Parameter]:
    """All parameters of this rank's stages, in stage order."""
    found = []
    for stage in stages:
        owners = {n: m for n, m in stage.named_modules() if isinstance(m, GroupedExperts)}
        for name, tensor in stage.named_parameters():
            owner = owners.get(name.rpartition(".")[0])
            if owner is None:
                found.append(Parameter(name, tensor))
            else:
                local = range(owner.first_expert, owner.first_expert + owner.num_local_experts)
                found.append(Parameter(name, tensor, local))
    return found


def build_optimizer(parameters: Iterable[Parameter], config: TrainConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, 2019); norms and other vectors are not decayed."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for parameter in parameters:
        (matrices if parameter.tensor.dim() >= 2 else vectors).append(parameter.tensor)
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.adam_eps,
    )


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then half a cosine down to ``min_learning_rate_ratio``.

    Args:
        step: Counted from 0.
        config: Its ``steps`` is where the cosine ends.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    span = max(1, config.steps - config.warmup_steps)
    share = min(1.0, (step - config.warmup_steps) / span)
    low = config.min_learning_rate_ratio
    return config.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * share)))


def reduce_gradients(parameters: Iterable[Parameter], mesh: Mesh) -> None:
    """Sum every gradient over the ranks that hold the same values.

    Losses are already divided by global counts, so sums are all there is. Missing gradients (an
    expert nobody chose) count as zero. One flat collective per group and dtype.
    """
    buckets: dict[tuple[bool, torch.dtype], list[nn.Parameter]] = {}
    for parameter in parameters:
        tensor = parameter.tensor
        if tensor.grad is None:
            tensor.grad = torch.zeros_like(tensor)
        buckets.setdefault((parameter.experts is not None, tensor.dtype), []).append(tensor)
    # All ranks of a group hold the same parameters in the same order, so buckets come in one order.
    for (of_experts, _), tensors in buckets.items():
        group = mesh.expert_replicas if of_experts else mesh.dp
        if group.size() > 1:
            _sum_flat([t.grad for t in tensors if t.grad is not None], group)


def _sum_flat(grads: list[Tensor], group: dist.ProcessGroup) -> None:
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat, group=group)
    for grad, summed in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(summed.view_as(grad))


class GradientNorm:
    """Squared gradient norms by parameter and expert; see Note [gradient norm].

    All ranks construct it together: they tell each other the names they hold.

    Args:
        parameters: This rank's.
        mesh: Decides which rank speaks for what.
        control: Group over all ranks for objects.

    Attributes:
        sizes: Entry name -> number of elements, over all ranks, sorted by name. An expert's entry
            ends in its index, ``layers.0.moe.experts.w1[3]``.
    """

    def __init__(
        self, parameters: Iterable[Parameter], mesh: Mesh, *, control: dist.ProcessGroup
    ) -> None:
        self._spoken: list[tuple[nn.Parameter, int]] = []
        spoken_names: list[str] = []
        mine: dict[str, int] = {}
        for parameter in parameters:
            names = _entry_names(parameter)
            mine |= dict.fromkeys(names, parameter.tensor.numel() // len(names))
            is_whole = parameter.experts is None
            if (mesh.dp_index == 0) if is_whole else mesh.is_first_expert_replica:
                self._spoken.append((parameter.tensor, len(names)))
                spoken_names += names
        everyone: list[dict[str, int]] = [{} for _ in range(control.size())]
        dist.all_gather_object(everyone, mine, group=control)
        self.sizes = dict(sorted({k: v for rank in everyone for k, v in rank.items()}.items()))
        position = {name: i for i, name in enumerate(self.sizes)}
        self._positions = torch.tensor([position[name] for name in spoken_names], dtype=torch.int64)

    def local_squares(self, device: torch.device) -> Tensor:
        """This rank's entries, zeros elsewhere: fp64 [entries], to be summed over all ranks."""
        squares = torch.zeros(len(self.sizes), dtype=torch.float64, device=device)
        norms = []
        for tensor, num_entries in self._spoken:
            assert tensor.grad is not None
            rows = tensor.grad.reshape(num_entries, -1)
            norms.append(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64))
        if norms:
            # One write: each would cost a copy of its positions, for which a GPU is waited for.
            self._positions = self._positions.to(device)
            squares[self._positions] = torch.cat(norms).square()
        return squares

    def first_bad(self, squares: Tensor) -> str | None:
        """Name of the first entry that is not finite, None if all are."""
        values = zip(self.sizes, squares.tolist(), strict=True)
        return next((name for name, value in values if not math.isfinite(value)), None)


def _entry_names(parameter: Parameter) -> list[str]:
    if parameter.experts is None:
        return [parameter.name]
    return [f"{parameter.name}[{expert}]" for expert in parameter.experts]


@torch.no_grad()
def clip_gradients(parameters: Iterable[Parameter], norm: float, max_norm: float) -> None:
    """Scale all gradients so that the whole model's norm is at most ``max_norm`` (0: never)."""
    if max_norm > 0 and norm > max_norm:
        for parameter in parameters:
            assert parameter.tensor.grad is not None
            parameter.tensor.grad.mul_(max_norm / norm)
