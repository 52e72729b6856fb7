"""This rank's part of a batch that every rank of a group has whole.

Shape symbols: B sequences of a batch, S whole sequence, N ranks, s = S / N.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hp_context.batch import CONTIGUOUS, SequenceLayout, shard_sequence
from hp_context.batch.loss import IGNORED, shift_labels


def shard_batch(
    batch: Mapping[str, Any],
    mesh_or_group: DeviceMesh | ProcessGroup,
    *,
    layout: SequenceLayout = CONTIGUOUS,
    ignore_index: int = IGNORED,
) -> dict[str, Any]:
    """Return this rank's part of a batch of a causal language model.

    The keys are those of transformers:

    - `input_ids` or `inputs_embeds` tell S.
    - `position_ids` are made if there are none, because a model would count each part from 0.
    - `labels` are shifted before they are split, so that the last token of a part still predicts
      the first of the next one. They come as `labels` and as `shift_labels`, which transformers
      does not shift again.
    - `attention_mask` is dropped, and labels at padding ignored: padding on the right is not seen
      by any token before it. Other padding is refused.
    - Any other tensor with S at dim 1 is split, anything else returned as it is.

    Args:
        batch: Whole sequences, the same on every rank.
        mesh_or_group: The ranks that share the sequence: a 1-D mesh or a group.
        layout: Positions of each rank; the same as of attention.
        ignore_index: Label of tokens that are not predicted.

    Raises:
        ValueError: The layout cannot split S evenly, or the batch has padding that attention would
            have to mask, or shapes do not fit.
    """
    seq_len = _seq_len(batch)
    whole = {name: value for name, value in batch.items() if name != "attention_mask"}
    position_ids, labels = batch.get("position_ids"), batch.get("labels")
    if position_ids is not None and (position_ids.ndim != 2 or position_ids.size(1) != seq_len):
        raise ValueError(f"position_ids ({tuple(position_ids.shape)}) must be [B, {seq_len}]")
    mask = batch.get("attention_mask")
    if mask is not None:
        _check_padding(mask, position_ids, seq_len)
    if position_ids is None:
        device = next(value for value in whole.values() if isinstance(value, Tensor)).device
        whole["position_ids"] = torch.arange(seq_len, device=device)[None]
    if labels is not None:
        if mask is not None:
            labels = labels.masked_fill(mask == 0, ignore_index)
        whole["labels"] = shift_labels(labels, ignore_index=ignore_index)
    mine = {
        name: shard_sequence(value, mesh_or_group, layout=layout) if _has(value, seq_len) else value
        for name, value in whole.items()
    }
    if labels is not None:
        mine["shift_labels"] = mine["labels"]
    return mine


def _seq_len(batch: Mapping[str, object]) -> int:
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(tokens := batch.get(name), Tensor):
            return tokens.size(1)
    raise ValueError(f"batch ({sorted(batch)}) must have input_ids or inputs_embeds")


def _has(value: object, seq_len: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 1 and value.size(1) == seq_len


def _check_padding(mask: Tensor, position_ids: Tensor | None, seq_len: int) -> None:
    if mask.ndim != 2 or mask.size(1) != seq_len:
        raise ValueError(
            f"attention_mask ({tuple(mask.shape)}) must be [B, {seq_len}], 0 at padding: pass "
            f"other masks to the model as context_mask, a hp_context.Mask"
        )
    seen = mask != 0
    if bool((seen[:, 1:] & ~seen[:, :-1]).any()):
        rest = int(seen.sum(1).min())
        raise ValueError(
            "attention_mask must be 0 on the right only: causal attention leaves out no other "
            "padding by itself; for padding on the left leave it out, and pass the model "
            "context_mask=hp_context.EachSequence(masks) with a mask for each sequence, such as "
            f"Causal() & Documents(({seq_len - rest}, {rest}))"
        )
    if position_ids is not None and bool((position_ids.diff(dim=1) != 1)[seen[:, 1:]].any()):
        raise ValueError(
            "attention_mask must be left out where position_ids pack documents: with it, "
            "transformers lets documents see each other"
        )
