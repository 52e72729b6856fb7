"""A rank's part of a batch, and a loss that does not depend on how tokens are split over ranks.

Each rank sums the losses of its own tokens and divides by the number of tokens of all ranks, which
is known before forward. The loss of a step is the sum over ranks and microbatches, and so
is each gradient: there is no factor of ranks anywhere, if gradients are summed (`sum_gradients`).

Shape symbols: B sequences of a batch, S whole sequence, N ranks, s = S / N, V vocabulary.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from operator import mul
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from hp_context.batch import CONTIGUOUS, SequenceLayout, shard_sequence
from hp_platform import resolve_group

M = TypeVar("M", bound=nn.Module)
IGNORED = -100

_summing: WeakSet[nn.Module] = WeakSet()  # twice would be a factor too many


def shift_labels(
    labels: Tensor, *, position_ids: Tensor | None = None, ignore_index: int = IGNORED
) -> Tensor:
    """Return the target of each token: the label of the next one.

    Do so before a sequence is split: the last token of a part predicts the first of the next part.

    Args:
        labels: int [B, S], of whole sequences.
        position_ids: int [B, S] or [1, S], 0 at the first token of a document; these are not to be
            predicted from the document before. None: labels are all there is to know.
        ignore_index: Label of tokens that are not predicted.

    Returns:
        Like `labels`; the last token of a sequence predicts nothing.
    """
    if position_ids is not None:
        labels = labels.masked_fill(position_ids == 0, ignore_index)
    return F.pad(labels[..., 1:], (0, 1), value=ignore_index)


def count_tokens(
    targets: Tensor | Iterable[Tensor],
    mesh_or_group: DeviceMesh | ProcessGroup | None = None,
    *,
    ignore_index: int = IGNORED,
) -> Tensor:
    """Return the number of tokens that are predicted in a step: int64 [], on the targets' device.

    Args:
        targets: Shifted labels of this rank, any shape; several for the microbatches of a step. Its
            part of the sequence, if that is split over the ranks.
        mesh_or_group: The ranks whose tokens are counted, each of which calls with targets of its
            own: context parallel and data parallel ones. A mesh of several axes: all of its ranks.
            None: this rank alone, as for whole sequences that no other rank has.
        ignore_index: Label of tokens that are not predicted.
    """
    listed = [targets] if isinstance(targets, Tensor) else list(targets)
    total = torch.stack([(part != ignore_index).sum() for part in listed]).sum()
    for group in _groups(mesh_or_group):
        dist.all_reduce(total, group=group)
    return total


def token_loss(
    logits: Tensor,
    targets: Tensor,
    *,
    num_tokens: Tensor | int,
    ignore_index: int = IGNORED,
) -> Tensor:
    """Return the share of this rank's tokens in the loss of a step.

    Args:
        logits: [B, s, V].
        targets: int [B, s], shifted labels.
        num_tokens: Tokens of all ranks and microbatches of the step: `count_tokens`. With none at
            all the loss is 0.
        ignore_index: Label of tokens that are not predicted.

    Returns:
        [], float32 or wider. Sum it over ranks and microbatches for the loss of the step.

    Raises:
        ValueError: Logits and targets do not fit.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets ({tuple(targets.shape)}) must have the shape of logits "
            f"({tuple(logits.shape)}) without the last dim"
        )
    wide = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(wide, targets.flatten(), reduction="sum", ignore_index=ignore_index)
    if isinstance(num_tokens, Tensor):
        return total / num_tokens.to(total.device).clamp(min=1)
    return total / max(num_tokens, 1)


def sum_gradients(model: M) -> M:
    """Let a data-parallel wrapper sum gradients over its ranks, where it would average them.

    The gradient of a loss that is a sum over tokens is a sum over ranks, as `token_loss` wants it.

    A `DistributedDataParallel` goes on averaging, which may happen in every microbatch, while each
    gradient is multiplied by the number of its ranks before it is accumulated. FSDP2 is told not
    to divide.

    Args:
        model: A `DistributedDataParallel`, or a model to which, and to whose parts, `fully_shard`
            was applied. Call it once all are wrapped.

    Returns:
        `model`.

    Raises:
        ValueError: The model is neither.
    """
    if isinstance(model, DistributedDataParallel):
        if model not in _summing:
            for name, parameter in model.module.named_parameters():
                if parameter.requires_grad and name not in model.parameters_to_ignore:
                    parameter.register_hook(partial(mul, model.process_group.size()))
            _summing.add(model)
        return model
    sharded = [part for part in model.modules() if isinstance(part, FSDPModule)]
    for part in sharded:
        part.set_gradient_divide_factor(1.0)
        # Without it the sum is one of products, which Gloo does not have and which NCCL has given
        # as zeros in bf16 (pytorch #190745).
        part.set_force_sum_reduction_for_comms(True)
    if not sharded:
        raise ValueError(
            f"model ({type(model).__name__}) must be a DistributedDataParallel, or sharded by "
            f"fully_shard; sum the gradients of any other with all_reduce"
        )
    return model


def _groups(mesh_or_group: DeviceMesh | ProcessGroup | None) -> list[ProcessGroup]:
    if mesh_or_group is None:
        return []
    if isinstance(mesh_or_group, DeviceMesh):
        return mesh_or_group.get_all_groups()
    return [resolve_group(mesh_or_group)]


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
