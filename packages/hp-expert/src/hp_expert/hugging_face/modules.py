"""The modules of a transformers model with experts over ranks: their classes with another forward.

A module keeps its place, names, parameters, configuration and hooks; only its class changes, to a
subclass of the class, as `torch.distributed.fsdp.fully_shard` changes it.

Experts that ranks share must compute each token once. Where several of those ranks run the model on
the same tokens, as tensor-parallel ranks of transformers do, each sends a part of the tokens to the
experts, and the outputs are gathered afterwards. The gradient of a token is on the rank that has
sent it; in backward the gradients are gathered before the model's own layers.

Shape symbols: T tokens, t of them on a rank, K experts per token, E experts, L local experts, D
width, H hidden width.
"""

from collections.abc import Sequence
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hp_expert.batch import ExpertBatch, LocalDispatcher, autocast_dtype
from hp_expert.dispatch import AnyDispatcher
from hp_expert.dispatch.refusal import dispatching, refuse, rows_for, through_experts
from hp_expert.dispatch.tensor_sliced import GatherSlices, Slice, even_sizes
from hp_expert.experts.module import SpreadExperts
from hp_expert.experts.swiglu import routed_swiglu_fused
from hp_expert.hugging_face.choice import (
    ReplacedChoice,
    current_choice,
    current_listeners,
    replayed,
)
from hp_expert.hugging_face.layout import (
    BIASES,
    GATE,
    WEIGHTS,
    has_own_gate,
    num_experts_of,
    refusal,
)
from hp_expert.routing.recompute import is_routing_saved
from hp_platform import all_gather_uneven, outside_graph


class DispatchedExperts(SpreadExperts):
    """Experts of a model of transformers, of which this rank has a part.

    Attributes:
        same_tokens: Ranks that have the same tokens; None: this rank has its own tokens.
    """

    same_tokens: ProcessGroup | None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Apply the experts; the names are those of transformers.

        Args:
            hidden_states: Tokens [T, D].
            top_k_index: Experts of each token, int64 [T, K].
            top_k_weights: Routing weights [T, K].
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
        compute, group = partial(_compute, self, self.dispatcher), self.same_tokens
        if group is None:
            return compute(hidden_states, top_k_index, top_k_weights)
        sizes = even_sizes(len(top_k_index), group.size())
        own = compute(
            Slice.apply(hidden_states, sizes, group, _gathered),
            top_k_index.split(sizes)[group.rank()],
            Slice.apply(top_k_weights, sizes, group, _gathered),
        )
        whole: Tensor = GatherSlices.apply(own, sizes, group, _gathered)
        return whole


class RoutedBlock(nn.Module):
    """A block that contains a router and, as a child, experts."""

    experts_name: str

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the block's own forward, with another choice of experts if one is given."""
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
    """Compute experts that are all local, as an entry of transformers' registry.

    Raises:
        ValueError: If the experts are of a layout or kind that cannot be computed here.
    """
    why = refusal(experts)
    if why is not None:
        raise ValueError(f"{type(experts).__name__} cannot be computed by hp_expert: {why}")
    dispatcher = LocalDispatcher(num_experts_of(experts))
    return _compute(experts, dispatcher, hidden_states, top_k_index, top_k_weights)


def change_class(module: nn.Module, mixin: type) -> None:
    """Change the class of a module to a subclass of it in which the mixin comes first."""
    kind: type = type(module)
    module.__class__ = _with_mixin(mixin, kind)


@cache
def _with_mixin(mixin: type, kind: type) -> type:
    """Return the same subclass in each call, so that classes can be compared."""
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})


def _gathered(x: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    return all_gather_uneven(x.contiguous(), sizes=sizes, group=group)


@outside_graph
def _compute(
    experts: nn.Module,
    dispatcher: AnyDispatcher,
    x_TD: Tensor,
    experts_TK: Tensor,
    weights_TK: Tensor,
) -> Tensor:
    # FSDP2, for example, puts tensors of a shorter dtype in the place of parameters.
    gate_up, down = (getattr(experts, name) for name in WEIGHTS)
    gate_up_bias, down_bias = (getattr(experts, name, None) for name in BIASES)
    rows = rows_for(dispatcher, x_TD)
    if torch.promote_types(autocast_dtype(rows), gate_up.dtype) != gate_up.dtype:
        # A norm in fp32 before weights in bf16, for example.
        rows = rows.to(gate_up.dtype)
    # Weights in fp32 get a gradient that is rounded to fp32 once, at the end.
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


def _by_own_gate(experts: nn.Module, batch: ExpertBatch) -> Tensor:
    """Compute experts one by one with the module's own function of gate and up.

    Returns:
        Outputs [N, D], as `routed_swiglu_fused`.
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
            getattr(experts, GATE)(x),
            down[index],
            None if down_bias is None else down_bias[index],
        )
        y = y.to(wide)
        if batch.weights is not None:
            y = y * batch.weights.flatten()[slots, None].to(wide)
        out = out.index_add(0, slots // width, y)
    return out.to(rows.dtype)


@outside_graph
def _raise_on_all_ranks(dispatcher: AnyDispatcher, x: Tensor, error: ValueError) -> None:
    """Raise an error of this rank, after telling the other ranks, which wait for its rows."""
    refuse(dispatcher, x, error)
    raise error
