"""What each module of the model has, computes and keeps for backward. No torch.

This is the one place that states it; tests compare it with the modules themselves.

Shape symbols: S positions of a sequence, D model width, N query heads, K key/value heads, H head
width, U width of value heads, F hidden width of a feed-forward, E experts, k experts per token,
V vocabulary.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import lru_cache, reduce
from typing import Any

from hp_train.config import Config, ModelConfig
from hp_train.layout.schedules import split_layers

WIDE_BYTES = 4
"""Of an element of what is never computed in less than float32."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter.

    Attributes:
        name: Name within its module.
        shape: Shape of the whole parameter.
        is_expert: Whether dim 0 is the experts of a layer.
    """

    name: str
    shape: tuple[int, ...]
    is_expert: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A module, or several of them one after the other. Told apart by identity, as a cached key.

    Attributes:
        weights: Its parameters, in the order of `torch.nn.Module.parameters`.
        flops: Operations of the forward per token; a multiplication and its addition are two.
        kept: Elements per token that autograd keeps from forward to backward, in the dtype of
            activations.
        wide: Elements per token that autograd keeps in float32 or wider.
        gathered: Elements per token that tensor-parallel ranks put together in forward, at the
            entry of what they cut.
        summed: Elements per token that they sum in forward, at its end.
        whole: Elements per token that each of them keeps of all positions, where there are several.
        heads: Elements per token that context-parallel ranks exchange for attention.
        attentions: Number of layers whose attention has that exchange.
        rows: Rows of width D per token that travel to experts and back, in one direction.
        again: What backward runs again of the forward, operations and exchanges; None: nothing.
    """

    weights: tuple[Weight, ...] = ()
    flops: float = 0.0
    kept: float = 0.0
    wide: float = 0.0
    gathered: float = 0.0
    summed: float = 0.0
    whole: float = 0.0
    heads: float = 0.0
    attentions: int = 0
    rows: int = 0
    again: "Work | None" = None

    def kept_bytes(self, tokens: int, *, size: int, tp: int = 1) -> float:
        """Bytes that a microbatch keeps from forward to backward on a rank.

        Args:
            tokens: Number of tokens of the microbatch that attention sees on the rank.
            size: Bytes of an element of activations.
            tp: Ranks that share them.
        """
        each = (self.kept * size + self.wide * max(size, WIDE_BYTES)) / tp
        return (each + (self.whole * size if tp > 1 else 0)) * tokens

    def cast_bytes(self, *, size: int, tp: int = 1, expert_ranks: int = 1) -> float:
        """Bytes of the matrices in the dtype of activations, which all microbatches share.

        Args:
            size: Bytes of an element of activations.
            tp: Ranks that share the dense matrices.
            expert_ranks: Ranks that share the experts.
        """
        if size >= WIDE_BYTES:
            return 0.0
        dense, routed = _cast_elements(self)
        return (dense / tp + routed / expert_ranks) * size

    def __add__(self, other: "Work") -> "Work":
        sums = {
            field.name: _plus(getattr(self, field.name), getattr(other, field.name))
            for field in fields(self)
        }
        return Work(**sums)

    def under(self, prefix: str) -> "Work":
        """The same with a prefix before the names."""
        named = tuple(Weight(prefix + w.name, w.shape, w.is_expert) for w in self.weights)
        return replace(self, weights=named)


@lru_cache(maxsize=4096)
def _cast_elements(work: Work) -> tuple[int, int]:
    """Elements of dense matrices, and of experts."""
    dense = sum(w.size for w in work.weights if not w.is_expert and len(w.shape) == 2)
    return dense, sum(w.size for w in work.weights if w.is_expert)


def matrix(name: str, rows: int, columns: int, *, bias: bool = False) -> Work:
    """A projection of `columns` to `rows` channels; what it keeps is counted where it is made."""
    weights = [Weight(f"{name}.weight", (rows, columns))]
    weights += [Weight(f"{name}.bias", (rows,))] if bias else []
    return Work(tuple(weights), flops=2.0 * rows * columns)


def norm(name: str, dim: int) -> Work:
    """RMSNorm: keeps its input and its output, which what follows reads."""
    return Work((Weight(f"{name}.weight", (dim,)),), kept=2 * dim, wide=1)


def attention(model: ModelConfig, layer: int, seq_len: int) -> Work:
    """Attention of one layer; a query sees half of the positions on average, or its window."""
    seen = min(model.sliding_window, seq_len) if model.has_window(layer) else seq_len / 2
    make = latent_attention if model.attention == "mla" else grouped_query_attention
    return make(model, seen)


def grouped_query_attention(model: ModelConfig, seen: float) -> Work:
    """Keeps q, k, v, and the output with its log-sum-exp."""
    D, N, K = model.dim, model.num_heads, model.num_kv_heads
    H, bias = model.head_dim or D // N, model.attention_bias
    parts = [matrix("wq", N * H, D, bias=bias), matrix("wo", D, N * H, bias=bias)]
    parts += [matrix(name, K * H, D, bias=bias) for name in ("wk", "wv")]
    for name, heads in (("q_norm", N), ("k_norm", K)) if model.qk_norm else ():
        # Of every head; its output is rotated at once, which keeps nothing.
        parts.append(Work((Weight(f"{name}.weight", (H,)),), kept=heads * H, wide=heads))
    if model.attention_sinks:
        parts.append(Work((Weight("core.sinks", (N,)),)))
    core = Work(
        flops=4.0 * seen * N * H,
        kept=2 * N * H + 2 * K * H,
        wide=N,
        heads=2 * N * H + 2 * K * H,
        attentions=1,
    )
    return _sum(parts) + core + cut(D)


def latent_attention(model: ModelConfig, seen: float) -> Work:
    """Keeps the latents around their norms, q, k, v, and the output with its log-sum-exp."""
    D, N, U = model.dim, model.num_heads, model.v_head_dim
    H = model.nope_head_dim + model.rope_head_dim
    if model.q_lora_rank:
        parts = [matrix("wq_a", model.q_lora_rank, D), norm("q_norm", model.q_lora_rank)]
        parts.append(matrix("wq_b", N * H, model.q_lora_rank))
    else:
        parts = [matrix("wq", N * H, D)]
    parts += [
        matrix("wkv_a", model.kv_lora_rank + model.rope_head_dim, D),
        norm("kv_norm", model.kv_lora_rank),
        matrix("wkv_b", N * (model.nope_head_dim + U), model.kv_lora_rank),
        matrix("wo", D, N * U),
    ]
    core = Work(
        flops=2.0 * seen * N * (H + U),
        kept=2 * N * H + 2 * N * U,
        wide=N,
        heads=2 * N * H + 2 * N * U,
        attentions=1,
    )
    return _sum(parts) + core + cut(D)


def swiglu(dim: int, hidden: int) -> Work:
    """w2(silu(w1 x) * w3 x): keeps both factors, the silu and the product."""
    work = _sum((matrix("w1", hidden, dim), matrix("w3", hidden, dim), matrix("w2", dim, hidden)))
    return work + Work(kept=4 * hidden)


def experts(model: ModelConfig) -> Work:
    """Router, routed experts and shared expert; routed ones keep two of their hidden rows."""
    D, F, E, k = model.dim, model.expert_hidden, model.num_experts, model.top_k
    router = Work((Weight("router.weight", (E, D)),), flops=2.0 * E * D, wide=E + 6 * k)
    if model.router_bias:
        router += Work((Weight("router.bias", (E,)),))
    shapes: dict[str, tuple[int, ...]] = {"w1": (E, F, D), "w3": (E, F, D), "w2": (E, D, F)}
    if model.expert_bias:
        shapes |= {"b1": (E, F), "b3": (E, F), "b2": (E, D)}
    stacked = tuple(Weight(f"experts.{n}", shape, is_expert=True) for n, shape in shapes.items())
    routed = Work(stacked, flops=6.0 * k * D * F, kept=2 * k * F, rows=k)
    work = router + routed
    if model.num_shared_experts:
        work += swiglu(D, model.num_shared_experts * F).under("shared.")
    return work


def layer(config: Config, index: int) -> Work:
    """One transformer layer with its norms and dropout, less what backward computes again."""
    return _layer(config.model, config.data.seq_len, config.train.recompute, index)


@lru_cache(maxsize=256)  # thousands of layouts ask for the same
def kept_once(model: ModelConfig, seq_len: int, *, size: int, tp: int) -> float:
    """Bytes per token that the largest layer keeps while backward computes it again.

    Args:
        model: Configuration of the run's model.
        seq_len: Sequence length of the run.
        size: Bytes of an element of activations.
        tp: Ranks that share them.
    """
    layers = [_layer(model, seq_len, "none", index) for index in range(model.num_layers)]
    return max(layer.kept_bytes(1, size=size, tp=tp) for layer in layers)


@lru_cache(maxsize=4096)  # thousands of layouts cut a model in few ways
def _layer(model: ModelConfig, seq_len: int, recompute: str, index: int) -> Work:
    attending = norm("attention_norm", model.dim)
    attending += attention(model, index, seq_len).under("attention.")
    feeding = norm("feed_forward_norm", model.dim)
    if model.is_dense(index):
        dense = swiglu(model.dim, model.dense_hidden).under("feed_forward.")
        feeding += dense + cut(model.dim)
    else:
        feeding += experts(model).under("moe.")
    # Each dropout keeps its mask.
    masks = Work(kept=2 * model.dim if model.dropout else 0)
    # Backward stops to run a part again when it has what it needs: before a sum that ends the part.
    ends_in_sum = model.is_dense(index)
    if recompute == "full":
        # Dropout at the end of a layer needs what it drops from.
        last = ends_in_sum and not model.dropout
        return repeated(attending + feeding + masks, model.dim, but_last_sum=last)
    if recompute == "attention":
        attending = repeated(attending, model.dim, but_last_sum=True)
    elif recompute == "feed_forward":
        feeding = repeated(feeding, model.dim, but_last_sum=ends_in_sum)
    return attending + feeding + masks


def cut(dim: int) -> Work:
    """What ranks exchange around a part of which each computes some heads or hidden channels."""
    return Work(gathered=dim, summed=dim, whole=dim)


def repeated(work: Work, dim: int, *, but_last_sum: bool) -> Work:
    """A part that runs again in backward: it keeps its input of width `dim` and nothing else."""
    again = replace(work, summed=work.summed - dim) if but_last_sum else work
    return replace(work, kept=float(dim), wide=0.0, whole=0.0, again=again)


def embedding(model: ModelConfig, vocab_size: int) -> Work:
    """A table that is looked up."""
    return Work((Weight("weight", (vocab_size, model.dim)),), kept=1, summed=model.dim)


def head(model: ModelConfig, vocab_size: int) -> Work:
    """Final norm, logits and their cross-entropy, which keeps their logarithms."""
    projection = matrix("output", vocab_size, model.dim)
    if model.tie_embeddings:
        projection = Work(flops=projection.flops)
    logits = Work(wide=vocab_size, gathered=model.dim, whole=model.dim)
    return norm("norm", model.dim) + projection + logits


def stage(config: Config, vocab_size: int, *, layers: range, first: bool, last: bool) -> Work:
    """A pipeline stage; names of parameters are those of the whole model."""
    key = (config.model, config.data.seq_len, config.train.recompute, vocab_size)
    return _stage(*key, layers=layers, first=first, last=last)


@lru_cache(maxsize=1024)
def _stage(
    model: ModelConfig,
    seq_len: int,
    recompute: str,
    vocab_size: int,
    *,
    layers: range,
    first: bool,
    last: bool,
) -> Work:
    table = embedding(model, vocab_size).under("embedding.")
    parts = [table] if first else []
    if last and not first and model.tie_embeddings:
        parts.append(Work(table.weights))
    parts += [_layer(model, seq_len, recompute, i).under(f"layers.{i}.") for i in layers]
    parts += [head(model, vocab_size)] if last else []
    for depth in range(1, model.num_mtp_modules + 1) if last else ():
        block = _layer(model, seq_len, recompute, model.num_layers + depth - 1)
        parts.append(prediction(model, block, vocab_size).under(f"mtp.{depth - 1}."))
    return _sum(parts)


def prediction(model: ModelConfig, block: Work, vocab_size: int) -> Work:
    """One module of multi-token prediction, with logits of its own by the model's matrix."""
    names = ("embedding_norm", "hidden_norm", "norm")
    parts = [norm(name, model.dim) for name in names]
    parts.append(matrix("projection", model.dim, 2 * model.dim))
    parts.append(block.under("block."))
    parts.append(Work(flops=2.0 * vocab_size * model.dim, wide=vocab_size))
    return _sum(parts)


def stages(config: Config, vocab_size: int, *, num_stages: int) -> tuple[Work, ...]:
    """The stages of a pipeline; those with layers of the same kinds are one and the same.

    Names of their parameters are those of the first of them.
    """
    key = (config.model, config.data.seq_len, config.train.recompute)
    return _stages(*key, vocab_size, num_stages)


@lru_cache(maxsize=1024)
def _stages(
    model: ModelConfig, seq_len: int, recompute: str, vocab_size: int, num_stages: int
) -> tuple[Work, ...]:
    known: dict[object, Work] = {}
    found = []
    for index, layers in enumerate(split_layers(model.num_layers, num_stages)):
        first, last = index == 0, index == num_stages - 1
        kinds = tuple((model.is_dense(i), model.has_window(i)) for i in layers)
        if (kinds, first, last) not in known:
            key = (model, seq_len, recompute, vocab_size)
            known[kinds, first, last] = _stage(*key, layers=layers, first=first, last=last)
        found.append(known[kinds, first, last])
    return tuple(found)


def whole_model(config: Config, vocab_size: int) -> Work:
    """All of it in one stage."""
    layers = range(config.model.num_layers)
    return stage(config, vocab_size, layers=layers, first=True, last=True)


def _plus(one: Any, other: Any) -> Any:
    """The sum of two values of a field, or the one that is there."""
    if one is None or other is None:
        return one or other
    return one + other


def _sum(parts: Iterable[Work]) -> Work:
    return reduce(Work.__add__, parts, Work())
