"""Attention and experts of a model of transformers, counted instead of computed.

Shape symbols: B sequences, S positions, N query heads, H width of a head, T tokens, K experts of a
token, D width, F hidden width of an expert.
"""

from functools import partial

from torch import Tensor, nn

from hp_expert.hugging_face.modules import DispatchedExperts, num_experts_of
from hp_trainer.model import Counted
from hp_transformers.stages.model import CausalModel

_NAME = "hp_train_counted"


def count_attention(model: CausalModel, counted: Counted) -> None:
    """Count attention of a model instead of computing it, if transformers' registry chooses it.

    Args:
        model: Model of transformers.
        counted: Functions that count.
    """
    from transformers import AttentionInterface  # noqa: PLC0415 - of those who have it
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask  # noqa: PLC0415

    AttentionInterface.register(_NAME, partial(_attended, counted))
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    try:
        model.set_attn_implementation(_NAME)
    except (ValueError, NotImplementedError):  # its own attention is counted by its operators
        return


def _attended(
    counted: Counted,
    module: nn.Module,
    *inputs: Tensor,
    sliding_window: int | None = None,
    **_others: object,
) -> tuple[Tensor, None]:
    """Count attention of query, key and value [B, N, S, H]; a function for the registry."""
    query, key, value, *_ = inputs
    length = key.shape[2]
    seen = length / 2 if getattr(module, "is_causal", True) else float(length)
    window = sliding_window or getattr(module, "sliding_window", None)
    if isinstance(window, int):
        seen = float(min(window, seen))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return counted.attend(q, k, v, seen), None


def count_experts(experts: nn.Module, counted: Counted, *, num_ranks: int) -> None:
    """Count stacked experts of a layer instead of computing them.

    Args:
        experts: Module with the stacked weights.
        counted: Functions that count.
        num_ranks: Number of tensor-parallel ranks; if experts are spread over expert-parallel
            ranks, each of these ranks sends a part of the tokens.
    """
    is_spread = isinstance(experts, DispatchedExperts)
    share = num_ranks if is_spread else 1
    elements = sum(p.numel() for p in experts.parameters(recurse=False)) // num_experts_of(experts)
    forward = experts.forward

    def mixed(*args: object, **kwargs: object) -> object:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        chosen = [x for x in tensors if not x.is_floating_point()]
        if len(chosen) != 1:  # another convention of arguments: its operators are counted
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
