"""Attention of one block of queries and keys with its log-sum-exp, by the kernel that takes it.

Note [Backward by blocks]
    A block knows its part of the scores only, but its gradients need the softmax over all of the
    keys. They follow from the final output and the final log-sum-exp of each query: the weights
    are exp(score - lse), so every block is given these two and none needs another block.

Shape symbols: B batch, Q queries of a block, K keys of a block, H query heads, G key/value heads (G
divides H), D head size of queries and keys, E head size of values.
"""

from enum import Enum
from typing import Final, Protocol

import torch
from torch import Tensor

from hp_context.kernels import cpu, cuda_efficient, cuda_flash, flex, reference
from hp_context.kernels.reference import BlockDropout, Scoring
from hp_context.masks import BlockKind


class Kernel(Enum):
    """A kernel that computes a block."""

    CPU_FLASH = "flash attention of the CPU"
    CUDA_FLASH = "flash attention of CUDA"
    CUDA_EFFICIENT = "efficient attention of CUDA"
    CUDA_FLEX = "FlexAttention"
    REFERENCE = "plain torch"


class BlockKernel(Protocol):
    """A module that computes blocks; its tensors have the head size in one piece of memory."""

    def applies(self, q: Tensor, v: Tensor, *, mask: Tensor | None, softcap: float | None) -> bool:
        """Tell whether it is the kernel to take such a block, in forward and in backward."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None,
        causal: bool,
        scoring: Scoring,
    ) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp, of any value for queries without keys."""

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        grad_out: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | None,
        causal: bool,
        scoring: Scoring,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk, dv; see Note [Backward by blocks]."""


MODULES: Final[dict[Kernel, BlockKernel]] = {
    Kernel.CUDA_FLEX: flex,
    Kernel.CPU_FLASH: cpu,
    Kernel.CUDA_FLASH: cuda_flash,
    Kernel.CUDA_EFFICIENT: cuda_efficient,
}
"""The kernels beside plain torch. A block without dropout goes to the first that applies."""


def block_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kind: BlockKind,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    dropout: BlockDropout | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend over the keys of one block.

    Args:
        q: [B, H, Q, D].
        k: [B, G, K, D].
        v: [B, G, K, E].
        kind: FULL, CAUSAL (Q = K) or PARTIAL.
        mask: bool [Q, K], true where attention is allowed; None unless `kind` is PARTIAL.
        scale: Factor of the scores.
        softcap: Bound of the scores, by tanh; FlexAttention on CUDA, plain torch elsewhere.
        dropout: Rule by which weights are dropped; in plain torch.

    Returns:
        Output [B, H, Q, E] in the dtype of `q`; log-sum-exp of the scores [B, H, Q] in float32 or
        wider. A query that sees no key of the block has output 0 and log-sum-exp -inf.
    """
    causal = kind is BlockKind.CAUSAL
    kernel = choose_kernel(q, v, mask=mask, softcap=softcap, dropout=dropout)
    scoring = Scoring(scale, softcap, dropout)
    out, lse = MODULES.get(kernel, reference).forward(
        *in_rows(q, k, v), mask=mask, causal=causal, scoring=scoring
    )
    if mask is not None:
        unseen = ~mask.any(-1)  # most kernels call their log-sum-exp 0
        out.masked_fill_(unseen[:, None], 0.0)
        lse.masked_fill_(unseen, -torch.inf)
    return out, lse


def block_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    kind: BlockKind,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    dropout: BlockDropout | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the share of one block in the gradients; see Note [Backward by blocks].

    Args:
        q: [B, H, Q, D].
        k: [B, G, K, D].
        v: [B, G, K, E].
        grad_out: [B, H, Q, E].
        out: [B, H, Q, E], over all blocks of these queries.
        lse: [B, H, Q], over all blocks; without -inf, see `softmax.for_backward`.
        kind: Same as in `block_forward`.
        mask: Same as in `block_forward`.
        scale: Same as in `block_forward`.
        softcap: Same as in `block_forward`.
        dropout: Same as in `block_forward`.

    Returns:
        dq, dk, dv like q, k, v, in their dtype or wider.
    """
    causal = kind is BlockKind.CAUSAL
    kernel = choose_kernel(q, v, mask=mask, softcap=softcap, dropout=dropout)
    grad_out, q, k, v, out = in_rows(grad_out, q, k, v, out)
    return MODULES.get(kernel, reference).backward(
        q,
        k,
        v,
        grad_out=grad_out,
        out=out,
        lse=lse,
        mask=mask,
        causal=causal,
        scoring=Scoring(scale, softcap, dropout),
    )


def choose_kernel(
    q: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    softcap: float | None = None,
    dropout: BlockDropout | None = None,
) -> Kernel:
    """Return the kernel for such a block: REFERENCE whenever no other is known to be right."""
    if dropout is not None:
        return Kernel.REFERENCE
    for kernel, module in MODULES.items():
        if module.applies(q, v, mask=mask, softcap=softcap):
            return kernel
    return Kernel.REFERENCE


def in_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors with the head size in one piece of memory, as kernels want it."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)
