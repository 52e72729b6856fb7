"""The modules of a transformers model with experts over ranks: their classes with another forward.

A module keeps its place, names, parameters, configuration and hooks; only its class changes, to a
subclass of the class, as `torch.distributed.fsdp.fully_shard` changes it.

transformers (5.x) keeps the experts of a layer as `gate_up_proj` [E, 2H, D] (rows 0 .. H - 1 gate,
the others up) and `down_proj` [E, D, H]; its decorator `use_experts_implementation` marks what
differs from that with attributes of the module. Nothing of transformers is imported here.

Experts that ranks share must compute each token once. Where several of those ranks run the model on
the same tokens, as tensor-parallel ranks of transformers do, each sends a part of the tokens to the
experts, and the outputs are gathered afterwards. The gradient of a token is on the rank that has
sent it; in backward the gradients are gathered before the model's own layers.

Shape symbols: T tokens, t of them on a rank, K experts per token, E experts, L local experts, D
width, H hidden width.
"""

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from hp_expert.batch import ExpertBatch, LocalDispatcher
from hp_expert.dispatch import AnyDispatcher, dispatching, refuse, rows_for, through_experts
from hp_expert.dispatch.tensor_sliced import GatherSlices, Slice, even_sizes
from hp_expert.experts.module import SpreadExperts
from hp_expert.experts.swiglu import routed_swiglu_fused
from hp_expert.hugging_face.choice import (
    ReplacedChoice,
    current_choice,
    current_listeners,
    replayed,
)
from hp_expert.routing.recompute import is_routing_saved
from hp_platform import all_gather_uneven, outside_graph
from hp_platform.autograd import autocast_dtype

WEIGHTS = ("gate_up_proj", "down_proj")
BIASES = ("gate_up_proj_bias", "down_proj_bias")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
GATE: Final = "_apply_gate"
"""Method of transformers that multiplies gate and up."""
_DEFAULT_GATE = "_default_apply_gate"
# The value that each mark must have, and the reason to refuse any other.
_MARKS = {
    "has_gate": (True, "it has no gate"),
    "is_transposed": (False, "its weights are transposed, [experts, in, out]"),
    "is_concatenated": (True, "its gate and up rows are interleaved"),
    "has_post_expert_norm": (False, "it normalizes the output of each expert"),
    "_is_expert_parallel": (False, "transformers has spread its experts over ranks already"),
}


def expert_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the path and module of all stacked weights of experts, in any layout."""
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        up = own.get("gate_up_proj", own.get("up_proj"))
        if up is not None and up.ndim == 3 and "down_proj" in own:
            yield path, module


def refusal(experts: nn.Module) -> str | None:
    """Return why the experts of a module cannot be computed here, or None if they can."""
    return _wrong_parameters(experts) or _wrong_marks(experts) or _wrong_shape(experts)


def has_own_gate(experts: nn.Module) -> bool:
    """Tell whether a module has its own function to multiply gate and up."""
    gate = getattr(type(experts), GATE, None)
    return getattr(gate, "__name__", "") not in ("", _DEFAULT_GATE)


def num_experts_of(experts: nn.Module) -> int:
    """Return the number of experts, E."""
    return experts.get_parameter("down_proj").shape[0]


def _wrong_parameters(experts: nn.Module) -> str | None:
    if any(isinstance(p, DTensor) for p in experts.parameters(recurse=False)):
        return "its parameters are sharded already: spread experts first, by FSDP2 and such later"
    own = {name: p.dtype for name, p in experts.named_parameters(recurse=False)}
    others = sorted(own.keys() - {*WEIGHTS, *BIASES})
    quantised = {name: dtype for name, dtype in own.items() if dtype not in _DTYPES}
    if quantised or any("scale" in name for name in others):
        return f"its weights are quantised ({quantised or others})"
    if others or not own.keys() >= set(WEIGHTS):
        return f"its parameters ({sorted(own)}) must be {WEIGHTS}, and {BIASES} if it has biases"
    return None


def _wrong_marks(experts: nn.Module) -> str | None:
    if not hasattr(experts, "is_transposed"):
        return "transformers does not let its computation be replaced (use_experts_implementation)"
    for mark, (wanted, why) in _MARKS.items():
        if getattr(experts, mark, wanted) != wanted:
            return why
    if has_own_gate(experts):
        return None
    activation = getattr(experts, "act_fn", None)
    is_silu = isinstance(activation, nn.SiLU) or activation is F.silu
    if is_silu or type(activation).__name__ == "SiLUActivation":
        return None
    return f"its activation ({activation}) must be silu"


def _wrong_shape(experts: nn.Module) -> str | None:
    E, D, H = experts.get_parameter("down_proj").shape
    gate_up = tuple(experts.get_parameter("gate_up_proj").shape)
    if gate_up != (E, 2 * H, D):
        return f"gate_up_proj {gate_up} must be {(E, 2 * H, D)} for down_proj {(E, D, H)}"
    named = getattr(experts, "num_experts", E)
    return None if named == E else f"num_experts ({named}) must equal its weights' ({E})"


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
