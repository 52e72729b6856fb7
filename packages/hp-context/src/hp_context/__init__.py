"""Context parallelism: attention over sequences split across ranks.

A name loads its module when it is first used.
"""

from typing import TYPE_CHECKING

from hp_base.lazy import lazily

if TYPE_CHECKING:
    from hp_context.api import ContextParallel
    from hp_context.async_ import AsyncContextParallel
    from hp_context.attention.core import Attention, masked_attention
    from hp_context.batch import (
        Contiguous,
        Deal,
        HeadTail,
        SequenceLayout,
        local_positions,
        shard_sequence,
        unshard_sequence,
    )
    from hp_context.batch.deal import deal_documents
    from hp_context.batch.deal_cost import DealCost, deal_cost
    from hp_context.batch.loss import (
        count_tokens,
        shard_batch,
        shift_labels,
        sum_gradients,
        token_loss,
    )
    from hp_context.batch.positions import documents_of
    from hp_context.cost import ExchangedBytes, exchanged_bytes
    from hp_context.hugging_face import register_attention
    from hp_context.masks import (
        BlockKind,
        Causal,
        Documents,
        EachSequence,
        Full,
        Mask,
        PositionMask,
        SlidingWindow,
        mask_tensor,
    )
    from hp_context.methods.in_flight import Fallback, OverlapCounts, OverlapRates
    from hp_context.methods.ulysses import head_to_seq, seq_to_head

__all__ = [
    "AsyncContextParallel",
    "Attention",
    "BlockKind",
    "Causal",
    "ContextParallel",
    "Contiguous",
    "Deal",
    "DealCost",
    "Documents",
    "EachSequence",
    "ExchangedBytes",
    "Fallback",
    "Full",
    "HeadTail",
    "Mask",
    "OverlapCounts",
    "OverlapRates",
    "PositionMask",
    "SequenceLayout",
    "SlidingWindow",
    "__version__",
    "count_tokens",
    "deal_cost",
    "deal_documents",
    "documents_of",
    "exchanged_bytes",
    "head_to_seq",
    "local_positions",
    "mask_tensor",
    "masked_attention",
    "register_attention",
    "seq_to_head",
    "shard_batch",
    "shard_sequence",
    "shift_labels",
    "sum_gradients",
    "token_loss",
    "unshard_sequence",
]
__version__ = "0.1.0"

__getattr__, __dir__ = lazily(
    __name__,
    {
        "AsyncContextParallel": "hp_context.async_",
        "Attention": "hp_context.attention.core",
        "BlockKind": "hp_context.masks",
        "Causal": "hp_context.masks",
        "ContextParallel": "hp_context.api",
        "Contiguous": "hp_context.batch",
        "Deal": "hp_context.batch",
        "DealCost": "hp_context.batch.deal_cost",
        "Documents": "hp_context.masks",
        "EachSequence": "hp_context.masks",
        "ExchangedBytes": "hp_context.cost",
        "Fallback": "hp_context.methods.in_flight",
        "Full": "hp_context.masks",
        "HeadTail": "hp_context.batch",
        "Mask": "hp_context.masks",
        "OverlapCounts": "hp_context.methods.in_flight",
        "OverlapRates": "hp_context.methods.in_flight",
        "PositionMask": "hp_context.masks",
        "SequenceLayout": "hp_context.batch",
        "SlidingWindow": "hp_context.masks",
        "count_tokens": "hp_context.batch.loss",
        "deal_cost": "hp_context.batch.deal_cost",
        "deal_documents": "hp_context.batch.deal",
        "documents_of": "hp_context.batch.positions",
        "exchanged_bytes": "hp_context.cost",
        "head_to_seq": "hp_context.methods.ulysses",
        "local_positions": "hp_context.batch",
        "mask_tensor": "hp_context.masks",
        "masked_attention": "hp_context.attention.core",
        "register_attention": "hp_context.hugging_face",
        "seq_to_head": "hp_context.methods.ulysses",
        "shard_batch": "hp_context.batch.loss",
        "shard_sequence": "hp_context.batch",
        "shift_labels": "hp_context.batch.loss",
        "sum_gradients": "hp_context.batch.loss",
        "token_loss": "hp_context.batch.loss",
        "unshard_sequence": "hp_context.batch",
    },
)
