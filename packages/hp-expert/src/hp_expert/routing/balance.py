"""Losses that keep experts equally busy, and logits small.

The loss of a token counts once. Ranks with their own tokens (data, expert and context parallel)
each add the loss of these. Tensor-parallel ranks with the same tokens all compute the same loss and
the same complete gradients: neither is summed over them.

Shape symbols: B sequences, S positions, T tokens, E experts, K experts per token.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hp_expert.routing.load import count_by_sequence
from hp_platform import resolve_group


def sequence_balance_loss(
    scores: Tensor,
    experts: Tensor,
    *,
    num_experts: int,
    group: ProcessGroup | DeviceMesh | None = None,
    padding: Tensor | None = None,
) -> Tensor:
    """Return the imbalance of experts in each sequence: 1 for equal use, more otherwise.

    For a sequence, the sum over experts of f_e * P_e, with f_e the share of its slots that went to
    expert e times E, and P_e the mean over its tokens of the expert's share of the scores
    ("DeepSeek-V3 Technical Report", arXiv:2412.19437, section 2.1.2). A sequence has one value
    whatever batch it is in, so a sum over sequences does not depend on microbatches or ranks.

    Args:
        scores: Scores of all experts, not negative [B, S, E].
        experts: The chosen experts, int64 [B, S, K], before any were dropped (`Routing.chosen`);
            -1 for none.
        num_experts: Number of experts, E.
        group: Ranks with other positions of the same B sequences, any number on each rank:
            context-parallel ranks. Each returns the part of its own positions. The parts of all
            ranks add up to the value of the whole, and so do their gradients.
        padding: Mask of positions without a token, bool [B, S]: the value is that of the sequence
            without them. None: there are none, on any rank of the group.

    Returns:
        One value per sequence [B], fp32 or wider; gradients flow through `scores` alone.

    Raises:
        ValueError: If the shapes do not fit each other.
    """
    _check(scores, experts, num_experts)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    counts_BE = count_by_sequence(experts.flatten(1), num_experts=num_experts)
    length: int | Tensor = max(scores.shape[1], 1)
    if padding is not None:
        counts_BE, length = _lengths_without(padding, counts_BE, group)
    elif group is not None:
        counts_BE, length = _sum_over_ranks(counts_BE, scores.shape[1], resolve_group(group))
    f_BE = counts_BE.to(scores.dtype) * (num_experts / (length * max(experts.shape[2], 1)))
    tiny = torch.finfo(scores.dtype).tiny
    shares_BSE = scores / scores.sum(dim=-1, keepdim=True).clamp_min(tiny)
    if padding is not None:
        shares_BSE = shares_BSE.masked_fill(padding.unsqueeze(-1), 0.0)
    p_BE = shares_BSE.sum(dim=1) / length
    return (f_BE * p_BE).sum(dim=1)


def document_balance_loss(
    scores: Tensor,
    experts: Tensor,
    documents: Tensor,
    lengths: Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
) -> Tensor:
    """Return the imbalance of experts in each document, as `sequence_balance_loss` of it alone.

    Documents that are packed together, and spread over ranks in any way, keep their own values:
    sums over documents do not depend on the documents of a microbatch.

    Args:
        scores: Scores of all experts, not negative [T, E].
        experts: The chosen experts, int64 [T, K], before any were dropped; -1 for none.
        documents: Document of each token, int64 [T] from 0; -1 for padding.
        lengths: Number of tokens of each document on all ranks, int64 [N], at least 1.
        group: Ranks with other tokens of these documents. Each returns the part of its own tokens,
            as in `sequence_balance_loss`.

    Returns:
        One value per document [N], fp32 or wider; gradients flow through `scores` alone.

    Raises:
        ValueError: If the shapes do not fit each other.
    """
    if scores.ndim != 2 or experts.shape[:-1] != documents.shape or len(scores) != len(experts):
        raise ValueError(
            f"scores ({tuple(scores.shape)}), experts ({tuple(experts.shape)}) and documents "
            f"({tuple(documents.shape)}) must be [T, E], [T, K] and [T]"
        )
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    num_documents, num_experts, top_k = len(lengths), scores.shape[1], experts.shape[1]
    is_there = (documents >= 0)[:, None]
    rows = documents.clamp_min(0)[:, None]
    chosen = experts.where(is_there & (experts >= 0), num_experts)
    places = (rows * (num_experts + 1) + chosen).reshape(1, -1)
    counts = count_by_sequence(places, num_experts=num_documents * (num_experts + 1))
    counts_NE = counts.view(num_documents, num_experts + 1)[:, :num_experts].contiguous()
    if group is not None:
        dist.all_reduce(counts_NE, group=resolve_group(group))
    lengths_N1 = lengths.to(torch.float64)[:, None]
    f_NE = counts_NE.to(scores.dtype) * (num_experts / (lengths_N1 * max(top_k, 1)))
    tiny = torch.finfo(scores.dtype).tiny
    shares_TE = scores / scores.sum(dim=-1, keepdim=True).clamp_min(tiny)
    # By a product, which sums in a fixed order, also on a GPU.
    owner_NT = documents == torch.arange(num_documents, device=documents.device)[:, None]
    sums_NE = owner_NT.to(scores.dtype) @ shares_TE.masked_fill(~is_there, 0.0)
    return (f_NE * (sums_NE / lengths_N1)).sum(dim=1)


def global_balance_loss(
    scores: Tensor,
    experts: Tensor,
    *,
    num_experts: int,
    group: ProcessGroup | DeviceMesh | None = None,
) -> Tensor:
    """Return the imbalance of experts over all tokens: 1 for equal use, more otherwise.

    The loss of Switch Transformers (arXiv:2101.03961, section 2.2) for K experts per token: E times
    the sum over experts of the share of slots times the mean share of the scores. transformers'
    `load_balancing_loss_func` gives K times this value. It is computed for one microbatch, and so
    depends on how a batch is cut into microbatches; with a group, it is that of a microbatch of all
    ranks ("Demons in the Detail", arXiv:2501.11873).

    Args:
        scores: Scores of all experts, not negative [..., E].
        experts: The chosen experts, int64 [..., K], before any were dropped; -1 for none.
        num_experts: Number of experts, E.
        group: Ranks with other tokens of the microbatch. Each returns the part of its own tokens.
            The parts of all ranks add up to the value of the whole, and so do their gradients.

    Returns:
        A scalar, fp32 or wider; gradients flow through `scores` alone.

    Raises:
        ValueError: If the shapes do not fit each other.
    """
    one_sequence = (
        scores.reshape(1, -1, scores.shape[-1]),
        experts.reshape(1, -1, experts.shape[-1]),
    )
    return sequence_balance_loss(*one_sequence, num_experts=num_experts, group=group)[0]


def router_z_loss(logits: Tensor, *, num_tokens: int | None = None) -> Tensor:
    """Return the mean over tokens of the squared log of the logits' summed exponentials.

    "ST-MoE" (arXiv:2202.08906), equation 5.

    Args:
        logits: `Routing.logits` [..., E].
        num_tokens: Number of tokens by which the sum over tokens is divided. With the number of all
            tokens of a step, the values of microbatches and ranks add up to the same for every
            layout. None: the tokens of this call; the value then depends on microbatching.

    Returns:
        A scalar, fp32 or wider.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    squares = wide.logsumexp(dim=-1).square()
    return squares.sum() / max(squares.numel() if num_tokens is None else num_tokens, 1)


def _sum_over_ranks(
    counts_BE: Tensor, num_positions: int, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return the counts, and the number of positions as an fp64 scalar, of all ranks."""
    summed = torch.cat([counts_BE.flatten(), counts_BE.new_full((1,), num_positions)])
    dist.all_reduce(summed, group=group)
    return summed[:-1].view_as(counts_BE), summed[-1].clamp_min(1).to(torch.float64)


def _lengths_without(
    padding: Tensor, counts_BE: Tensor, group: ProcessGroup | DeviceMesh | None
) -> tuple[Tensor, Tensor]:
    """Return the counts and lengths without padding of all ranks; lengths are fp64 [B, 1]."""
    lengths_B1 = (~padding).sum(dim=1, keepdim=True)
    if group is not None:
        summed = torch.cat([counts_BE, lengths_B1.to(counts_BE.dtype)], dim=1)
        dist.all_reduce(summed, group=resolve_group(group))
        counts_BE, lengths_B1 = summed.split([counts_BE.shape[1], 1], dim=1)
    return counts_BE, lengths_B1.clamp_min(1).to(torch.float64)


def _check(scores: Tensor, experts: Tensor, num_experts: int) -> None:
    if scores.ndim != 3 or scores.shape[-1] != num_experts:
        raise ValueError(
            f"scores ({tuple(scores.shape)}) must be [B, S, num_experts ({num_experts})]"
        )
    if experts.ndim != 3 or experts.shape[:2] != scores.shape[:2]:
        raise ValueError(
            f"experts ({tuple(experts.shape)}) must be [B, S, K] for scores ({tuple(scores.shape)})"
        )
