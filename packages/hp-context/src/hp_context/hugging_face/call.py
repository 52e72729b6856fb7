"""The mask of a forward of transformers, as a description that all layers share.

A model of transformers 5 makes its mask before its layers run, by a function that is registered
beside the attention. That function is told shapes, of this rank's part alone, and the kind of
mask, but not the position ids; these come with each layer. So it returns a `CallMask`, and the
first layer of the forward fills it in. Layers that are computed again find it filled in.

Shape symbols: B sequences of a batch, S whole sequence, N ranks, s = S / N.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hp_context.masks import Causal, Mask, SlidingWindow

Rows = list[int] | None  # sequences of a batch; None: all


class CallMask:
    """The mask of one forward of a model.

    Attributes:
        window: Keys that a query may see, itself included; None: all before it.
        error: Reason why the model cannot run; raised by the first layer, on all ranks.
        has_attention_mask: Whether the model was given a padding mask, with no padding in it.
        masks: Masks, each with its sequences; None before the first layer.
    """

    def __init__(
        self, window: int | None, error: Exception | None, *, has_attention_mask: bool
    ) -> None:
        self.window, self.error = window, error
        self.has_attention_mask = has_attention_mask
        self.masks: list[tuple[Mask, Rows]] | None = None

    @property
    def order(self) -> Mask:
        """Return the mask of a query within its document."""
        return Causal() if self.window is None else SlidingWindow(self.window - 1)


def make_call_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: object = None,
    device: torch.device | None = None,
    **others: object,
) -> CallMask:
    """Describe the mask of a forward: a mask function of transformers.

    Args:
        batch_size: Number of sequences in the batch, B.
        q_length: Length of the queries, s.
        kv_length: Length of the keys, s unless a cache holds some.
        q_offset: Keys before the first query.
        mask_function: What the model allows, as a function of local indices; used for a check.
        attention_mask: bool [B, s], false at padding.
        local_size: Window, or size of chunks.
        use_vmap: Whether the model adds a mask of its own.
        config: Configuration of the model.
        device: Device of the model.
        **others: What else transformers tells its own mask functions.
    """
    call = CallMask(local_size, None, has_attention_mask=attention_mask is not None)
    try:
        _check_cache(q_length, kv_length, q_offset, attention_mask)
        _check_kind(local_size, config, own=use_vmap, both="allow_is_bidirectional_skip" in others)
        if not others.get("allow_is_causal_skip", True):
            _check_causal(mask_function, batch_size, q_length, device)
        _check_padding(attention_mask)
    except ValueError as error:
        call.error = error
    return call


def _check_cache(
    q_length: int, kv_length: int, q_offset: int | Tensor, attention_mask: Tensor | None
) -> None:
    if attention_mask is not None and attention_mask.size(-1) != q_length:
        raise ValueError(
            f"attention_mask ({tuple(attention_mask.shape)}) must be of this rank's part of the "
            f"sequence ({q_length} positions): use shard_batch"
        )
    if kv_length != q_length or isinstance(q_offset, Tensor) or q_offset:
        raise ValueError(
            f"past_key_values (queries {q_length}, keys {kv_length}, offset {q_offset}) must be "
            f"None with hp_context: generate with another attn_implementation, and pass "
            f"use_cache=False in training"
        )


def _check_kind(local_size: int | None, config: object, *, own: bool, both: bool) -> None:
    if both:
        raise ValueError(
            "is_causal (False) must be True with hp_context: attention looks back only"
        )
    if own:
        raise ValueError(
            "the model adds a mask function of its own, which hp_context cannot tell from "
            "position_ids: pass the whole mask to the model as context_mask, a hp_context.Mask"
        )
    chunk, window = (getattr(config, n, None) for n in ("attention_chunk_size", "sliding_window"))
    if local_size is not None and (chunk is not None or local_size != window):
        raise ValueError(
            f"local attention (size {local_size}) must be a sliding window with hp_context, not "
            f"chunks (attention_chunk_size {chunk}, sliding_window {window})"
        )


def _check_padding(attention_mask: Tensor | None) -> None:
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError(
            "attention_mask must not mask padding with hp_context: give sequences padded on the "
            "right to shard_batch, which drops it (causal attention sees none of that padding), "
            "or pack them with position_ids"
        )


def _check_causal(
    mask_function: Callable[..., Tensor],
    batch_size: int,
    q_length: int,
    device: torch.device | None,
) -> None:
    """Raise if some query sees the key after it, as tokens of one image do in some models.

    Such blocks change nothing else that transformers tells; neither do packed documents.
    """
    sequence = torch.arange(batch_size, device=device)[:, None]
    query = torch.arange(q_length - 1, device=device)[None, :]
    if bool(mask_function(sequence, torch.zeros_like(sequence), query, query + 1).any()):
        raise ValueError(
            "the model lets blocks of tokens see each other both ways, which hp_context cannot "
            "tell from position_ids: pass the whole mask as context_mask, a hp_context.Mask"
        )
