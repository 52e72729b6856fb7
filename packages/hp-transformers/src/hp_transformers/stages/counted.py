"""Attention and experts of a model of transformers, counted instead of computed.

Shape symbols: B sequences, S positions, N query heads, H width of a head, T tokens, K experts of a
token, D width, F hidden width of an expert.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn

from hp_expert.hugging_face.layout import num_experts_of
from hp_expert.hugging_face.modules import DispatchedExperts
from hp_trainer.model import Counted

_NAME = "hp_train_counted"


def count_attention(model: Any, counted: Counted) -> None:
    """Let attention of a model be counted, if it is by transformers' registry.

    Args:
        model: Model of transformers.
        counted: What counts.
    """
    from transformers import AttentionInterface  # noqa: PLC0415 - of those who have it
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask  # noqa: PLC0415

    AttentionInterface.register(_NAME, partial(_attended, counted))
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    try:
        model.set_attn_implementation(_NAME)
    except (ValueError, NotImplementedError):  # what it computes by itself is counted as it is
        return


def _attended(
    counted: Counted,
    module: Any,
    *inputs: Tensor,
    sliding_window: int | None = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """Be an attention function of transformers, of query, key and value [B, N, S, H]."""
    query, key, value, *_ = inputs
    length = key.shape[2]
    seen = length / 2 if getattr(module, "is_causal", True) else float(length)
    window = sliding_window or getattr(module, "sliding_window", None)
    if isinstance(window, int):
        seen = float(min(window, seen))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return counted.attend(q, k, v, seen), None


def count_experts(experts: nn.Module, counted: Counted, *, num_ranks: int) -> None:
    """Let stacked experts be counted.

    Args:
        experts: Their module.
        counted: What counts.
        num_ranks: Tensor-parallel ranks; where experts are spread, each sends a part of the tokens.
    """
    is_spread = isinstance(experts, DispatchedExperts)
    share = num_ranks if is_spread else 1
    elements = sum(p.numel() for p in experts.parameters(recurse=False)) // num_experts_of(experts)
    forward = experts.forward

    def mixed(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        chosen = [x for x in tensors if not x.is_floating_point()]
        if len(chosen) != 1:  # of another convention: counted as it is
            return forward(*args, **kwargs)
        x = tensors[0]
        x_TD = x.reshape(-1, x.shape[-1])
        chosen_TK = chosen[0].reshape(len(x_TD), -1)
        hidden = experts.get_parameter("down_proj").numel() // (
            num_experts_of(experts) * x_TD.shape[1]
        )
        # transformers keeps copies of rows in front of and behind experts, and more between.
        kept = 2 * hidden if is_spread else 4 * hidden + 2 * x_TD.shape[1]
        return counted.mix(x_TD, chosen_TK, elements, kept=kept, share=share).view(x.shape)

    experts.forward = mixed
