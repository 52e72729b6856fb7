"""Modules of a transformers model that are experts, and reasons why some cannot be computed here.

transformers (5.x) keeps the experts of a layer as `gate_up_proj` [E, 2H, D] (rows 0 .. H - 1 gate,
the others up) and `down_proj` [E, D, H]; its decorator `use_experts_implementation` marks what
differs from that with attributes of the module. Nothing of transformers is imported here.

Shape symbols: E experts, D width, H hidden width.
"""

from collections.abc import Iterator
from typing import Final

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

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
    return None if _is_silu(activation) else f"its activation ({activation}) must be silu"


def _is_silu(activation: object) -> bool:
    return (
        isinstance(activation, nn.SiLU)
        or activation is F.silu
        or type(activation).__name__ == "SiLUActivation"
    )


def _wrong_shape(experts: nn.Module) -> str | None:
    E, D, H = experts.get_parameter("down_proj").shape
    gate_up = tuple(experts.get_parameter("gate_up_proj").shape)
    if gate_up != (E, 2 * H, D):
        return f"gate_up_proj {gate_up} must be {(E, 2 * H, D)} for down_proj {(E, D, H)}"
    named = getattr(experts, "num_experts", E)
    return None if named == E else f"num_experts ({named}) must equal its weights' ({E})"
