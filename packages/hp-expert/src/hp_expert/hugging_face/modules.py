"""What a transformers model's modules become: the same classes with another forward.

A module keeps its place, names, parameters, configuration and hooks; only its class changes, to a
subclass of its own, as `torch.distributed.fsdp.fully_shard` does it.

Shape symbols: T tokens, K experts per token, E experts, L local experts, D width, H hidden width.
"""

from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hp_expert.batch import ExpertBatch, autocast_dtype
from hp_expert.dispatch import Dispatcher, LocalDispatcher
from hp_expert.dispatch.refusal import dispatching, refuse, rows_for, through_experts
from hp_expert.experts import routed_swiglu_fused
from hp_expert.hugging_face.choice import (
    ReplacedChoice,
    current_choice,
    current_listeners,
    replayed,
)
from hp_expert.hugging_face.layout import (
    BIASES,
    WEIGHTS,
    has_own_gate,
    num_experts_of,
    refusal,
)
from hp_expert.hugging_face.same_tokens import of_own_tokens
from hp_expert.routing.recompute import is_routing_saved
from hp_expert.styles.ranks import ExpertRanks
from hp_platform import outside_graph


class DispatchedExperts(nn.Module):
    """Experts of which this rank has a part.

    Attributes:
        dispatcher: Brings rows to the experts' ranks and back.
        first_expert: Global index of the first one here.
        total_experts: Experts on all ranks.
        ranks: The ranks that share the experts; None: all are here.
        same_tokens: Ranks that have the same tokens; None: this one has tokens of its own.
    """

    dispatcher: Dispatcher[Any]
    first_expert: int
    total_experts: int
    ranks: ExpertRanks | None
    same_tokens: ProcessGroup | None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Apply the experts; the names are those of transformers.

        Args:
            hidden_states: [T, D].
            top_k_index: Experts of each token, int64 [T, K].
            top_k_weights: What each counts [T, K].
        """
        choice = current_choice()
        if choice is not None:
            error = choice.error(top_k_index)
            if error is not None:
                _raise_on_all_ranks(self.dispatcher, hidden_states, error)
            assert choice.experts is not None
            top_k_index = choice.experts
        if choice is None or not choice.repeated:
            for listener in current_listeners():
                listener(self, top_k_index)
        compute = partial(_compute, self, self.dispatcher)
        if self.same_tokens is not None:
            compute = partial(of_own_tokens, compute, self.same_tokens)
        return compute(hidden_states, top_k_index, top_k_weights)


class RoutedBlock(nn.Module):
    """A block that contains a router and, as a child, experts."""

    experts_name: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's own forward; the choice of experts may come from elsewhere."""
        forward = super().forward
        experts = getattr(self, self.experts_name)
        assert isinstance(experts, DispatchedExperts)
        replay = replayed(experts)
        if replay is None and not is_routing_saved():
            return forward(*args, **kwargs)
        choice = ReplacedChoice(experts, num_experts=experts.total_experts, replay=replay)
        with choice.inside():
            return forward(*args, **kwargs)


def experts_forward(
    experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute experts that are all here: what transformers' registry gets.

    Raises:
        ValueError: If they are of a layout or kind that cannot be computed here.
    """
    why = refusal(experts)
    if why is not None:
        raise ValueError(f"{type(experts).__name__} cannot be computed by hp_expert: {why}")
    dispatcher = LocalDispatcher(num_experts_of(experts))
    return _compute(experts, dispatcher, hidden_states, top_k_index, top_k_weights)


def change_class(module: nn.Module, mixin: Any) -> None:
    """Let a module's class be a subclass of it in which the mixin comes first."""
    kind: Any = type(module)
    module.__class__ = _with_mixin(mixin, kind)


@cache
def _with_mixin(mixin: Any, kind: Any) -> Any:
    """Return always the same subclass, for whoever compares classes."""
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})


@outside_graph
def _compute(
    experts: nn.Module,
    dispatcher: Dispatcher[Any],
    x_TD: Tensor,
    experts_TK: Tensor,
    weights_TK: Tensor,
) -> Tensor:
    # Whoever computes in a shorter dtype puts tensors of it in the place of parameters.
    gate_up, down = (getattr(experts, name) for name in WEIGHTS)
    gate_up_bias, down_bias = (getattr(experts, name, None) for name in BIASES)
    rows = rows_for(dispatcher, x_TD)
    if torch.promote_types(autocast_dtype(rows), gate_up.dtype) != gate_up.dtype:
        # A norm in fp32 before weights in bf16, for example.
        rows = rows.to(gate_up.dtype)
    # What the router computed in fp32 gets a gradient that is rounded to it once, at the end.
    weights_TK = weights_TK.to(torch.promote_types(weights_TK.dtype, rows.dtype))
    with dispatching(dispatcher):
        rows, state = dispatcher.prepare(rows, experts_TK, weights_TK)

    def compute(batch: ExpertBatch) -> Tensor:
        if has_own_gate(experts):
            return _by_own_gate(experts, batch)
        return routed_swiglu_fused(
            batch, gate_up, down, gate_up_bias=gate_up_bias, down_bias=down_bias
        )

    return through_experts(dispatcher, compute, rows, state).to(x_TD.dtype)


def _by_own_gate(experts: Any, batch: ExpertBatch) -> Tensor:
    """Compute experts one by one, whose module multiplies gate and up by itself.

    Returns:
        [N, D], as `routed_swiglu_fused`.
    """
    rows, width = batch.rows, batch.num_slots_per_row
    counts = batch.counts or tuple(batch.num_tokens_per_expert.tolist())
    gate_up, down = (getattr(experts, name).to(rows.dtype) for name in WEIGHTS)
    biases = [getattr(experts, name, None) for name in BIASES]
    gate_up_bias, down_bias = (None if b is None else b.to(rows.dtype) for b in biases)
    wide = torch.promote_types(rows.dtype, torch.float32)
    out = torch.zeros_like(rows, dtype=wide)
    for index, slots in enumerate(batch.order[: sum(counts)].split(counts)):
        x = F.linear(
            rows[slots // width],
            gate_up[index],
            None if gate_up_bias is None else gate_up_bias[index],
        )
        y = F.linear(
            experts._apply_gate(x),  # noqa: SLF001 - what transformers' own computations call
            down[index],
            None if down_bias is None else down_bias[index],
        )
        y = y.to(wide)
        if batch.weights is not None:
            y = y * batch.weights.flatten()[slots, None].to(wide)
        out = out.index_add(0, slots // width, y)
    return out.to(rows.dtype)


@outside_graph
def _raise_on_all_ranks(dispatcher: Dispatcher[Any], x: Tensor, error: ValueError) -> None:
    """Raise an error that this rank found, and have the others, which wait for it, raise too."""
    refuse(dispatcher, x, error)
    raise error
