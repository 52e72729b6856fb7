"""The experts that a transformers model chose: recorded, and replayed.

Reinforcement learning generates with one engine and trains with another. Small differences make a
few tokens choose other experts, and training becomes unstable ("Stabilizing MoE Reinforcement
Learning by Aligning Training and Inference Routers", arXiv:2510.11370). So the trainer takes the
experts that the rollout took; the weights of the experts, and the gradients of the router, are
computed by the trainer's own router.

Shape symbols: B sequences, S positions, T = B * S tokens, K experts per token.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from hp_expert.hugging_face.choice import listening, replaying
from hp_expert.hugging_face.modules import DispatchedExperts
from hp_expert.routing.recompute import save_routing

# Attribute of transformers with the function that checkpoints a layer, a `functools.partial`.
_CHECKPOINT = "_gradient_checkpointing_func"


class RoutingRecord:
    """The experts that a model chose.

    Attributes:
        calls: Experts that each call chose, int64 [T, K], by path of the module of experts, in the
            order of the layers.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.calls: dict[str, list[Tensor]] = {path: [] for path in modules}
        self._path = {id(module): path for path, module in modules.items()}

    def add(self, module: nn.Module, experts: Tensor) -> None:
        """Record a call of a module, if the module is one of this model."""
        path = self._path.get(id(module))
        if path is not None:
            self.calls[path].append(experts.detach())

    def experts(self, *, num_sequences: int = 1) -> list[Tensor]:
        """Return the experts of each layer, its calls joined along the sequences: [B, S, K].

        Args:
            num_sequences: Number of sequences, B. Each call has the next tokens of every sequence,
                as in `generate`.
        """
        return [
            torch.cat([call.view(num_sequences, -1, call.shape[-1]) for call in calls], dim=1)
            for calls in self.calls.values()
        ]


@contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingRecord]:
    """Record the experts that a model chooses in this context.

    Costs 8 bytes per token, layer and choice, and no time. Choices that a recompute repeats under
    `save_routing` are not recorded again.

    Args:
        model: Model that `apply_to_transformers` returned.

    Raises:
        ValueError: If `apply_to_transformers` was not applied to the model.
    """
    found = RoutingRecord(_dispatched(model))
    with listening(found.add):
        yield found


@contextmanager
def replay_routing(
    model: nn.Module, experts: Sequence[Tensor] | Mapping[str, Tensor]
) -> Iterator[None]:
    """Let a model take recorded experts in this context; its routers get gradients.

    The model's own router computes the weights of these experts from their scores. Every call in
    the context takes the same experts: use one context for each batch. The context may end before
    backward. If layers are recomputed, their checkpoints must be under `save_routing`.

    Args:
        model: Model that `apply_to_transformers` returned.
        experts: Experts of each token by layer, in the order of the layers or by path of the module
            of experts: integer [T, K] or [B, S, K]. -1 is no expert: such a slot adds nothing;
            routers that normalize weights count it as expert 0. Layers that a mapping does not
            name choose themselves.

    Raises:
        ValueError: If the layers are not those of the model, or a recompute would choose again. A
            shape that does not fit the tokens, and experts that do not exist, are found by the
            layer, which raises on every rank.
    """
    modules = _dispatched(model)
    if not isinstance(experts, Mapping):
        if len(experts) != len(modules):
            raise ValueError(
                f"len(experts) ({len(experts)}) must equal the number of layers with experts "
                f"({len(modules)})"
            )
        experts = dict(zip(modules, experts, strict=True))
    unknown = sorted(experts.keys() - modules.keys())
    if unknown:
        raise ValueError(f"experts ({unknown}) must be of layers of the model ({list(modules)})")
    _require_saved_routing(model)
    by_module = {id(modules[path]): chosen.flatten(0, -2) for path, chosen in experts.items()}
    with replaying(lambda module: by_module.get(id(module))):
        yield


def _dispatched(model: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {
        p: m for p, m in model.named_modules() if isinstance(m, DispatchedExperts)
    }
    if not found:
        raise ValueError(
            f"model ({type(model).__name__}) must be one that apply_to_transformers returned"
        )
    return found


def _require_saved_routing(model: nn.Module) -> None:
    """Raise ValueError for activation checkpointing whose recompute would route again."""
    for path, module in model.named_modules():
        if not (module.training and getattr(module, "gradient_checkpointing", False)):
            continue
        keywords = getattr(getattr(module, _CHECKPOINT, None), "keywords", {})
        context_fn = keywords.get("context_fn")
        if isinstance(context_fn, partial):
            context_fn = context_fn.func
        if context_fn is not save_routing:
            raise ValueError(
                f"context_fn of activation checkpointing ({context_fn}, of {path or 'the model'}) "
                "must be hp_expert.save_routing for a routing to be replayed: model."
                "activation_checkpointing_enable({'use_reentrant': False, "
                "'context_fn': save_routing})"
            )
