"""Context parallelism: attention over sequences split across ranks."""

from hp_context.api import ContextParallel
from hp_context.async_ import AsyncContextParallel
from hp_context.attention.core import Attention, masked_attention
from hp_context.batch.deal import deal_documents
from hp_context.batch.deal_cost import DealCost, deal_cost
from hp_context.batch.layout import (
    Contiguous,
    Deal,
    HeadTail,
    SequenceLayout,
    local_positions,
    shard_sequence,
    unshard_sequence,
)
from hp_context.batch.loss import count_tokens, shift_labels, sum_gradients, token_loss
from hp_context.batch.positions import documents_of
from hp_context.batch.shard import shard_batch
from hp_context.cost import ExchangedBytes, exchanged_bytes
from hp_context.hugging_face import register_attention
from hp_context.masks.mask import (
    BlockKind,
    Causal,
    Documents,
    Full,
    Mask,
    PositionMask,
    SlidingWindow,
    mask_tensor,
)
from hp_context.masks.sequences import EachSequence
from hp_context.methods.overlap import Fallback, OverlapCounts, OverlapRates
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
