"""What each module of the model has, computes and keeps for backward. No torch.

This is the one place that states it; tests compare it with the modules themselves.

Shape symbols: S positions of a sequence, D model width, N query heads, K key/value heads, H head
width, F hidden width of a feed-forward, E experts, k experts per token, V vocabulary.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce

from hp_train.config import Config, ModelConfig

WIDE_BYTES = 4
"""Of an element of what is never computed in less than float32."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter.

    Attributes:
        name: Within its module.
        shape: Of the whole.
        is_expert: Whether dim 0 is the experts of a layer.
    """

    name: str
    shape: tuple[int, ...]
    is_expert: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Work:
    """A module, or several of them one after the other.

    Attributes:
        weights: Its parameters, in the order of `torch.nn.Module.parameters`.
        flops: Of the forward per token; a multiplication and its addition are two.
        kept: Elements per token that autograd keeps from forward to backward, in the dtype of
            activations.
        wide: Likewise, in float32 or wider.
        rows: Rows of width D per token that travel to experts and back, in one direction.
    """

    weights: tuple[Weight, ...] = ()
    flops: float = 0.0
    kept: float = 0.0
    wide: float = 0.0
    rows: int = 0

    def kept_bytes(self, tokens: int, *, size: int) -> float:
        """Bytes that a microbatch keeps from forward to backward.

        Args:
            tokens: Of the microbatch.
            size: Bytes of an element of activations. Where that is less than 4, every microbatch
                keeps its own copy of the dense weights in that dtype as well.
        """
        dense = sum(weight.size for weight in self.weights if not weight.is_expert)
        copies = dense if size < WIDE_BYTES else 0
        return (self.kept * size + self.wide * max(size, WIDE_BYTES)) * tokens + copies * size

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.weights + other.weights,
            self.flops + other.flops,
            self.kept + other.kept,
            self.wide + other.wide,
            self.rows + other.rows,
        )

    def under(self, prefix: str) -> "Work":
        """The same with a prefix before the names."""
        named = tuple(Weight(prefix + w.name, w.shape, w.is_expert) for w in self.weights)
        return replace(self, weights=named)


def matrix(name: str, rows: int, columns: int) -> Work:
    """A projection of `columns` to `rows` channels; what it keeps is counted where it is made."""
    return Work((Weight(f"{name}.weight", (rows, columns)),), flops=2.0 * rows * columns)


def norm(name: str, dim: int) -> Work:
    """RMSNorm: keeps its input, that normalized, and its output, which what follows reads."""
    return Work((Weight(f"{name}.weight", (dim,)),), kept=dim, wide=2 * dim + 1)


def attention(model: ModelConfig, seq_len: int) -> Work:
    """Grouped-query attention: keeps q, k, v, and the output with its log-sum-exp."""
    D, N, K = model.dim, model.num_heads, model.num_kv_heads
    H = model.head_dim or D // N
    projections = _sum(
        (
            matrix("wq", N * H, D),
            matrix("wk", K * H, D),
            matrix("wv", K * H, D),
            matrix("wo", D, N * H),
        )
    )
    # Scores and weighted sums over S / 2 positions on average.
    scores = Work(flops=2.0 * seq_len * N * H, kept=2 * N * H + 2 * K * H, wide=N)
    return projections + scores


def swiglu(dim: int, hidden: int) -> Work:
    """w2(silu(w1 x) * w3 x): keeps both factors, the silu and the product."""
    work = _sum((matrix("w1", hidden, dim), matrix("w3", hidden, dim), matrix("w2", dim, hidden)))
    return work + Work(kept=4 * hidden)


def experts(model: ModelConfig) -> Work:
    """Router, routed experts and shared expert; routed ones keep two of their hidden rows."""
    D, F, E, k = model.dim, model.expert_hidden, model.num_experts, model.top_k
    router = Work((Weight("router.weight", (E, D)),), flops=2.0 * E * D, wide=E + 6 * k)
    stacked = tuple(
        Weight(f"experts.{name}", shape, is_expert=True)
        for name, shape in (("w1", (E, F, D)), ("w3", (E, F, D)), ("w2", (E, D, F)))
    )
    routed = Work(stacked, flops=6.0 * k * D * F, kept=2 * k * F, rows=k)
    work = router + routed
    if model.num_shared_experts:
        work += swiglu(D, model.num_shared_experts * F).under("shared.")
    return work


def layer(model: ModelConfig, index: int, seq_len: int) -> Work:
    """One transformer layer with its norms and dropout."""
    work = norm("attention_norm", model.dim)
    work += attention(model, seq_len).under("attention.")
    work += norm("feed_forward_norm", model.dim)
    if index < model.num_dense_layers:
        work += swiglu(model.dim, model.dense_hidden).under("feed_forward.")
    else:
        work += experts(model).under("moe.")
    # Each dropout keeps its mask.
    return work + Work(kept=2 * model.dim if model.dropout else 0)


def embedding(model: ModelConfig, vocab_size: int) -> Work:
    """A table that is looked up."""
    return Work((Weight("weight", (vocab_size, model.dim)),), kept=1)


def head(model: ModelConfig, vocab_size: int) -> Work:
    """Final norm, logits and their cross-entropy, which keeps their logarithms."""
    work = norm("norm", model.dim)
    projection = matrix("output", vocab_size, model.dim)
    if model.tie_embeddings:
        projection = Work(flops=projection.flops)
    return work + projection + Work(wide=vocab_size)


def stage(config: Config, vocab_size: int, *, layers: range, first: bool, last: bool) -> Work:
    """A pipeline stage; names of parameters are those of the whole model."""
    model, seq_len = config.model, config.data.seq_len
    parts = [embedding(model, vocab_size).under("embedding.")] if first else []
    parts += [layer(model, index, seq_len).under(f"layers.{index}.") for index in layers]
    parts += [head(model, vocab_size)] if last else []
    return _sum(parts)


def whole_model(config: Config, vocab_size: int) -> Work:
    """All of it in one stage."""
    layers = range(config.model.num_layers)
    return stage(config, vocab_size, layers=layers, first=True, last=True)


def _sum(parts: Iterable[Work]) -> Work:
    return reduce(Work.__add__, parts, Work())


def named_weights(work: Work) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes."""
    return ((weight.name, weight.shape) for weight in work.weights)
