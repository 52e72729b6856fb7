"""The update of a step: gradients clipped, AdamW or Muon, and the learning-rate schedule."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.optim.adamw import adamw

from hp_expert import take_loads, update_correction_biases
from hp_optim import Layout, Muon
from hp_trainer.config import Config, TrainConfig
from hp_trainer.layout.mesh import Mesh
from hp_trainer.layout.ranks import GROUPS, chunk
from hp_trainer.model.parameters import Parameter
from hp_trainer.model.stage import Stage

MOMENTS: Final = ("exp_avg", "exp_avg_sq")
"""What Adam averages of each parameter."""
_RATE_KEYS: Final = ("learning_rate", "min_learning_rate_ratio", "warmup_steps", "steps")
"""Keys of `TrainConfig` by which `learning_rate` is found."""
_SAME_RATE: Final = 1e-9
"""By how much two learning rates may differ that are the same."""


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW for parameters that all have gradients in every step.

    torch looks up the state of each parameter in each step; this does so once, before the first
    one. Nothing may put other tensors into `state` after that.
    """

    _lists: "Sequence[_Lists] | None" = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # returns no loss
        """Move all parameters by their gradients."""
        del closure
        if self._lists is None:
            self._lists = [_Lists.of(group["params"], self.state) for group in self.param_groups]
        for group, lists in zip(self.param_groups, self._lists, strict=True):
            beta1, beta2 = group["betas"]
            adamw(
                lists.parameters,
                [p.grad for p in lists.parameters if p.grad is not None],
                lists.averages,
                lists.squares,
                [],
                lists.steps,
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


class _Lists(NamedTuple):
    """Parameters of a group and their state, in one order."""

    parameters: list[Tensor]
    averages: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]

    @classmethod
    def of(cls, parameters: list[Tensor], state: Mapping[Tensor, Mapping[str, Tensor]]) -> "_Lists":
        of_each = [state[parameter] for parameter in parameters]
        return cls(parameters, *([each[name] for each in of_each] for name in (*MOMENTS, "step")))


def _materialize(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter its state now instead of at the first step.

    A resumed run loads into the very tensors the optimizer will use.
    """
    for group in optimizer.param_groups:
        is_muon = group.get("algorithm") == "muon"
        for tensor in group["params"]:
            state = optimizer.state[tensor]
            if is_muon:
                state["momentum_buffer"] = torch.zeros_like(tensor)
            elif not state:
                # Beside the parameter: a fused update on a GPU takes nothing from the host.
                state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
                for moment in MOMENTS:
                    state[moment] = torch.zeros_like(tensor, memory_format=torch.preserve_format)


def build_optimizer(
    parameters: Iterable[Parameter], config: TrainConfig, mesh: Mesh | None = None
) -> AdamW | Muon:
    """Make AdamW (Loshchilov and Hutter, 2019), which decays no norms and no biases, or Muon.

    Args:
        parameters: Parameters of this rank.
        config: Configuration of the training.
        mesh: Mesh of the run, of which Muon asks who has which part of a matrix; None: nothing is
            cut.
    """
    decayed: list[tuple[str, Tensor]] = []
    others: list[tuple[str, Tensor]] = []
    matrices: list[tuple[str, Tensor]] = []
    layouts: dict[str, Layout] = {}
    for parameter in parameters:
        named = parameter.name, parameter.local
        if config.optimizer == "muon" and _is_for_muon(parameter):
            matrices.append(named)
            if mesh is not None:
                layouts[parameter.name] = _layout(parameter, mesh)
        else:
            (decayed if parameter.spec.kind == "matrix" else others).append(named)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": (config.beta1, config.beta2),
        "eps": config.adam_eps,
        "fused": True,  # one pass over memory instead of seven
    }
    optimizer: AdamW | Muon
    if config.optimizer == "adamw":
        optimizer = AdamW([group for group in groups if group["params"]], **options)
    else:
        rest = [group | options | {"algorithm": "adamw"} for group in groups]
        optimizer = Muon(
            [group for group in ({"params": matrices}, *rest) if group["params"]],
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",  # as large as AdamW's updates (arXiv:2502.16982)
            layouts=layouts,
            dtype=torch.float64 if config.dtype == "float64" else torch.bfloat16,
        )
    _materialize(optimizer)
    return optimizer


def _is_for_muon(parameter: Parameter) -> bool:
    spec, num_dims = parameter.spec, len(parameter.shape)
    return spec.kind == "matrix" and not spec.is_table and num_dims == 2 + spec.is_expert


def _layout(parameter: Parameter, mesh: Mesh) -> Layout:
    """Tell which part of a parameter each rank of its stage has."""
    stage = mesh.stage
    held = []
    for rank in stage.members:
        part = [range(size) for size in parameter.shape]
        for group, dim in parameter.cuts:
            axes = GROUPS[group]
            part[dim] = chunk(part[dim], stage.size(*axes), stage.index(rank, *axes))
        held.append(tuple(part))
    return Layout(parameter.shape, tuple(stage.members), tuple(held))


class Update:
    """Moves the weights of a rank by a step's gradients, or drops what the step computed.

    Attributes:
        optimizer: AdamW or Muon over this rank's parameters.

    Args:
        config: Configuration of the run.
        parameters: Parameters of this rank.
        stages: Stages of this rank.
        mesh: Mesh of the run.
    """

    def __init__(
        self,
        config: Config,
        parameters: Sequence[Parameter],
        stages: Collection[Stage],
        mesh: Mesh,
    ) -> None:
        self._model = config.model
        self._parameters, self._stages, self._mesh = parameters, stages, mesh
        self.optimizer = build_optimizer(parameters, config.train, mesh)

    def apply(self, grad_norm: float, rate: float, *, max_norm: float) -> None:
        """Clip the gradients and move weights and correction biases by them.

        Args:
            grad_norm: Gradient norm of the whole model.
            rate: Learning rate.
            max_norm: Norm to which gradients are clipped; 0: they are not.
        """
        clip_gradients(self._parameters, grad_norm, max_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.update_tied_copies()
        self.optimizer.zero_grad()
        self._balance_experts()

    def drop(self) -> None:
        """Forget the gradients of a step, and how its tokens chose their experts."""
        self.optimizer.zero_grad()
        for stage in self._stages:
            take_loads(stage)

    def update_tied_copies(self) -> None:
        """Give copies of tied parameters the weights of what they are tied to."""
        for parameter in self._parameters:
            if parameter.tied_copies:
                parameter.update_tied_copies()

    def _balance_experts(self) -> None:
        """Move the correction biases of routers by the load of the step; all ranks the same way."""
        model = self._model
        if model.correction_bias and model.correction_rate > 0:
            tokens = self._mesh.groups["tokens"]
            for stage in self._stages:
                update_correction_biases(stage, rate=model.correction_rate, group=tokens)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return a rate of linear warm-up, then half a cosine down to ``min_learning_rate_ratio``.

    Args:
        step: Counted from 0.
        config: Its ``steps`` is where the cosine ends.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    share = min(1.0, (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    low = config.min_learning_rate_ratio
    return config.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * share)))


def changed_rate(saved: Mapping[str, Any], train: TrainConfig, step: int) -> list[str]:
    """Say where a resumed run goes on with another learning rate than it would have had.

    More steps stretch the cosine, so that a run that had ended is heated up again.

    Args:
        saved: Values of the section ``train`` with which the checkpoint was saved; those that are
            missing, or no numbers, are taken as they are now.
        train: Configuration of the training from here on.
        step: Steps that are done.

    Returns:
        A line for people, or none.
    """
    numbers = {name: value for name in _RATE_KEYS if type(value := saved.get(name)) in (int, float)}
    changed = [name for name, value in numbers.items() if value != getattr(train, name)]
    new, old = learning_rate(step, train), learning_rate(step, replace(train, **numbers))
    if math.isclose(old, new, rel_tol=_SAME_RATE):
        return []
    causes = ", ".join(f"train.{n} was {numbers[n]:g}, is {getattr(train, n):g}" for n in changed)
    line = (
        f"note: the learning rate of step {step + 1} is {new:.3g}, and would have been {old:.3g}: "
        f"{causes}; to go on with it: --train.learning_rate {old:.3g} "
        "--train.min_learning_rate_ratio 1 --train.warmup_steps 0"
    )
    return [line]


@torch.no_grad()
def clip_gradients(parameters: Sequence[Parameter], norm: float, max_norm: float) -> None:
    """Scale all gradients so that the whole model's norm is at most ``max_norm`` (0: never)."""
    if max_norm > 0 and norm > max_norm:
        gradients = [p.local.grad for p in parameters if p.local.grad is not None]
        torch._foreach_mul_(gradients, max_norm / norm)
